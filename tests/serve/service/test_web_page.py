"""The web page in a real browser, on the whole service."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Browser, expect

from eval.measuring.psnr import psnr_db
from sdxl.images import encode, read_parameters
from sdxl.params import GenerationParams
from sdxl.picture_files import file_of
from tests.sdxl.test_infotext import A1111, COMFY
from tests.serve.servers import GENERATE
from tests.serve.service.browsers import EITHER_WIDTH, VIEWS, View, Visit, pixels, visit
from tests.serve.service.conftest import SCREENSHOTS
from tests.serve.services import Service

PROMPT = "a red circle on a blue background"
SHOWN = (
    ("a yellow star on a black background", "11"),
    ("a large orange triangle in the center on a green background", "3"),
    ("a purple ring on a yellow background", "5"),
    ("a white circle on a red background", "2"),
    ("a green square on a white background", "8"),
    ("three orange circles on a blue background", "1"),
)


def test_n_pictures_have_seeds_in_a_row_and_a_click_reuses_one(web: Visit) -> None:
    web.generate(PROMPT, pictures=4, seed="", steps="4")
    web.wait_for_pictures(4)
    chips = web.page.locator("#stage").get_by_role("button", name="seed ")
    seeds = [int(text.removeprefix("seed ")) for text in chips.all_inner_texts()]
    assert seeds == list(range(seeds[0], seeds[0] + 4))
    expect(web.page.locator("#thumbs li")).to_have_count(4)
    assert web.holds()["seed"] == ""
    chips.last.click()
    assert web.holds()["seed"] == str(seeds[-1])
    assert read_parameters(web.download())["seed"] in seeds


def test_a_picture_forms_through_previews_and_a_reload_loses_nothing(web: Visit) -> None:
    web.generate(PROMPT, steps="40", seed="6", guidance="3.5", scheduler="dpmpp_2m_karras")
    expect(web.page.locator("#scheduler option:checked")).to_have_text("DPM++ 2M Karras")
    web.wait_for_pictures()
    file = web.download()
    final = pixels(file)
    previews = {each.partition(",")[2] for each in web.page.evaluate("previews")}
    assert len(previews) >= 2, f"{len(previews)} previews were seen, needed 2"
    for each in previews:
        preview = pixels(base64.b64decode(each))
        assert preview.shape == final.shape and not np.array_equal(preview, final)
    web.page.click("#theme")
    light = paper(web)
    web.page.click("#theme")
    dark, held = paper(web), web.holds()
    web.reload()
    expect(web.page.locator("#thumbs li")).to_have_count(1)
    assert (web.holds(), web.download()) == (held, file)
    assert paper(web) == dark != light
    web.page.locator("#thumbs button").click()
    facts = web.page.locator("#viewer-facts").inner_text()
    assert PROMPT in facts and "3.5" in facts and "DPM++ 2M Karras" in facts


def paper(web: Visit) -> str:
    """Return the page's background."""
    found: str = web.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    return found


def test_the_default_interval_follows_the_steps_until_one_is_chosen(web: Visit) -> None:
    assert web.holds()["cache_interval"] == ""
    expect(web.page.locator("#cache-hint")).to_contain_text("as many steps as needed")
    shown = web.page.get_attribute("[data-parameter=cache_interval]", "title")
    assert shown and "below 8 steps 1" in shown
    web.generate(PROMPT, steps="4", seed="3")
    web.wait_for_pictures()
    assert read_parameters(web.download())["cache_interval"] == 1
    web.generate(PROMPT, steps="4", cache_interval="2")
    expect(web.page.locator("#thumbs li")).to_have_count(2)
    assert read_parameters(web.download())["cache_interval"] == 2
    web.page.click("#reset")
    assert web.holds()["cache_interval"] == ""
    expect(web.page.get_by_label("Auto", exact=True)).to_be_checked()


def test_a_dropped_picture_gives_its_settings_and_is_rendered_again(
    web: Visit, http: httpx.Client
) -> None:
    asked: dict[str, Any] = {
        "prompt": 'ein “roter” Kreis, 円 \\ "seed": 1',
        "negative_prompt": "blue",
        "size": "96x160",
        "steps": 7,
        "guidance_scale": 3.25,
        "scheduler": "dpmpp_2m_karras",
        "cache_interval": 4,
        # The seeds have more digits than a browser's number can hold.
        "variation_seed": 2**60 + 3,
        "variation_strength": 0.25,
        "seed": 2**60 + 1,
    }
    (data,) = http.post(GENERATE, json=asked).json()["data"]
    file = base64.b64decode(data["b64_json"])
    web.drop("circle.png", file)
    expect(web.page.locator("#notices")).to_contain_text("circle.png")
    names = {"guidance_scale": "guidance"}
    expected = {names.get(k, k): str(v) for k, v in asked.items()} | {"n": "1"}
    unsaid = (
        "deep_steps",
        "guidance_interval",
        "guided_steps",
        "loras",
        "controls",
        "image_prompts",
    )
    upscaling = ("upscale", "upscaler", "upscale_strength", "upscale_steps")
    expected |= dict.fromkeys((*unsaid, *upscaling), "")
    assert web.holds() == expected, "with one model, none is chosen"
    expect(web.page.get_by_label("Model", exact=True)).to_be_hidden()
    web.generate()
    web.wait_for_pictures()
    again = web.download()
    assert read_parameters(again) == read_parameters(file)
    psnr = psnr_db(pixels(again), pixels(file))
    assert psnr >= 45, f"{psnr:.1f} dB from the dropped picture, needed 45"


def saying(name: str, text: str) -> bytes:
    """Return a picture with this text in its file."""
    info = PngInfo()
    info.add_text(name, text)
    return file_of(Image.new("RGB", (96, 96)), pnginfo=info)


def test_what_a_dropped_file_says_of_itself_decides(web: Visit) -> None:
    plain = file_of(Image.new("RGB", (8, 8)))
    for file in (plain, b"", b"GIF89a", plain[:20]):
        web.drop("other.png", file)
        expect(web.page.get_by_role("alert")).to_contain_text("does not say how it was made")
        web.page.click("#notices [aria-label=Dismiss]")
    # The scheduler is no name, and no selector of the page's program.
    params = {"prompt": "a", "seed": 1, "steps": 4, "width": 96, "height": 96}
    web.drop("odd.png", saying("sdxl", json.dumps({**params, "scheduler": '"]\\'})))
    notices = web.page.locator("#notices")
    expect(notices).to_contain_text("The settings are those of odd.png")
    assert web.holds()["scheduler"] == '"]\\'
    # `sdxl render` names the model `mini`.
    rendered = GenerationParams(PROMPT, seed=1, width=128, height=128).as_dict()
    file = encode(np.zeros((128, 128, 3), np.uint8), "png", {**rendered, "model": "mini"})
    web.drop("rendered.png", file)
    expect(notices).to_contain_text("Generate makes the same picture.")
    for program, text, left_out in (
        ("webui", saying("parameters", A1111), "Left out"),
        ("ComfyUI", saying("prompt", json.dumps(COMFY)), "Left out: node LoraLoader"),
    ):
        web.page.fill("#prompt", "what was here")
        web.drop(f"{program}.png", text)
        expect(notices).to_contain_text(f"The settings are those of {program}.png")
        expect(notices).to_contain_text("Another program made it, so the picture will differ.")
        expect(notices).to_contain_text(left_out)
        held = web.holds()
        assert held["prompt"] not in ("", "what was here") and held["steps"] in ("25", "30")
        assert held["seed"].isdigit() and "x" in held["size"] and float(held["guidance"]) > 1


def test_the_keyboard_alone_is_enough(browser: Browser, running: Service) -> None:
    with visit(browser, running.url, VIEWS[0]) as web:
        web.page.keyboard.press("Control+k")
        web.page.keyboard.type(PROMPT)
        web.page.keyboard.press("Control+Enter")
        web.wait_for_pictures()
        expect(web.page.locator("#announcer")).to_contain_text("is done in")
        web.page.locator("#stage button.frame").focus()
        web.page.keyboard.press("Enter")
        expect(web.page.locator("#viewer")).to_be_visible()
        web.page.keyboard.press("Escape")
        expect(web.page.locator("#viewer")).to_be_hidden()
        web.page.keyboard.press("Control+Shift+Enter")
        expect(web.page.locator("#stage .wipe")).to_be_visible()


# The browser's database is slower than the service.
SLOW_DATABASE = """
const { set } = Object.getOwnPropertyDescriptor(IDBRequest.prototype, "onsuccess");
Object.defineProperty(IDBRequest.prototype, "onsuccess", {
  set(act) { set.call(this, () => setTimeout(act, 1000)); },
});
"""


def test_the_page_says_it_is_ready_once_its_form_is_complete(
    browser: Browser, running: Service
) -> None:
    with visit(browser, running.url, VIEWS[0]) as web:
        web.page.add_init_script(SLOW_DATABASE)
        web.page.reload()
        expect(web.page.locator("#service")).to_have_text("sdxl-mini")
        assert web.page.locator("[name=upscale]").count() == 1


def test_the_documentation_needs_no_network(browser: Browser, running: Service) -> None:
    with visit(browser, running.url, VIEWS[0], "/docs") as web:
        expect(web.page.locator(".opblock-summary-path").first).to_be_visible()
        expect(web.page.locator("#swagger-ui")).to_contain_text("/v1/images/generations")


@pytest.mark.phone
@pytest.mark.parametrize(
    "view",
    [pytest.param(each, marks=() if each in EITHER_WIDTH else pytest.mark.long) for each in VIEWS],
    ids=str,
)
def test_the_page_is_accessible_in_every_state(
    browser: Browser, running: Service, view: View, shots: Path
) -> None:
    """axe-core checks every state of the page, and screenshots show it."""
    shot = shots / f"web-{view}.png"
    with visit(browser, running.url, view) as web:
        expect(web.page.locator("#service")).to_have_text("sdxl-mini")
        assert web.violations() == []
        for i, (prompt, seed) in enumerate(SHOWN if SCREENSHOTS else SHOWN[:2], 1):
            web.generate(prompt, seed=seed)
            expect(web.page.locator("#thumbs li")).to_have_count(i)
        catch_forming(web, shot)
        assert web.violations() == []
        web.wait_for_pictures(2)
        web.open_settings()
        assert web.violations() == []
        web.page.locator("#thumbs button").first.click()
        assert web.violations() == []
        web.page.keyboard.press("Escape")
        web.drop("none.png", b"")
        web.page.click("#clear")
        assert web.violations() == []
    with Image.open(shot) as image:
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 1000, "an empty picture"


def catch_forming(web: Visit, shot: Path) -> None:
    """Return the page when both of two pictures have had two previews."""
    web.page.evaluate("previews.length = 0")
    web.generate(PROMPT, pictures=2, steps="100", seed="7")
    web.page.evaluate("document.querySelector('#more').open = false")
    while web.page.evaluate("previews.length") < 4:
        time.sleep(0.02)
    if web.view.name == "desktop":
        web.page.evaluate("scrollTo(0, 0)")
    web.page.screenshot(path=shot)
