"""The page's form: several models, sizes, folded groups, other programs' pictures, and a stable
layout."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Browser, Route, expect

from sdxl.checkpoint import MINI, Checkpoint
from sdxl.images import read_parameters
from sdxl.pipeline import Pipeline
from serve.front.api import create_app
from serve.settings import ServeSettings
from tests.fakes import fake_engines
from tests.sdxl.test_infotext import A1111, COMFY
from tests.serve.servers import listening_to
from tests.serve.service.browsers import View, Visit, visit
from tests.serve.workers import running

PROMPT = "a red circle on a blue background"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    other = Pipeline(Checkpoint("other", MINI), fake_engines((1, 2, 4)))
    tables = ({"model": "mini"}, {"model": "/models/other"})
    with (
        running() as first,
        running(other) as second,
        listening_to(create_app([first, second], ServeSettings(models=tables))) as url,
    ):
        yield url


@pytest.fixture
def two(browser: Browser, address: str, view: View) -> Iterator[Visit]:
    with visit(browser, address, view) as found:
        yield found


def test_a_model_is_chosen_and_makes_the_picture(two: Visit) -> None:
    page = two.page
    model = page.get_by_label("Model", exact=True)
    expect(model.locator("option")).to_have_text(["sdxl-mini", "other"])
    model.select_option("other")
    expect(page.locator("#service")).to_have_text("other")
    expect(page.locator("#shown button")).to_have_count(0)
    assert not two.violations()
    two.reload()
    expect(page.locator("#service")).to_have_text("other")
    two.generate(PROMPT, steps="2")
    two.wait_for_pictures()
    made = two.download()
    assert read_parameters(made)["model"] == "other"
    model.select_option("sdxl-mini")
    two.drop("made.png", made)
    expect(page.locator("#notices")).to_contain_text("Generate makes the same picture.")
    expect(page.locator("#service")).to_have_text("other")


def test_examples_that_come_late_are_not_those_of_another_model(two: Visit) -> None:
    page = two.page
    late: list[Route] = []
    page.route("**/v1/images/examples?model=sdxl-mini", lambda route: late.append(route))
    two.reload()
    page.get_by_label("Model", exact=True).select_option("other")
    expect(page.locator("#examples button")).to_have_count(3)
    (held,) = late
    with page.expect_response("**/v1/images/examples?model=sdxl-mini"):
        held.continue_()
    page.evaluate("() => new Promise((done) => setTimeout(done, 200))")
    expect(page.locator("#shown button")).to_have_count(0)


def test_a_size_is_a_usual_one_or_typed_and_can_be_swapped(web: Visit) -> None:
    page = web.page
    web.open_settings()
    sizes = page.locator("#size option").all_inner_texts()
    assert sizes[:3] == ["128 × 128", "144 × 112", "112 × 144"], "SDXL's 1152 × 896 at 128"
    page.locator("#size").select_option("144x112")
    expect(page.get_by_label("Width", exact=True)).to_have_value("144")
    page.get_by_role("button", name="Swap width and height").click()
    assert web.holds()["size"] == "112x144"
    page.get_by_label("Width", exact=True).fill("96")
    page.get_by_label("Height", exact=True).fill("72")
    assert web.holds()["size"] == "96x72"
    page.get_by_role("button", name="Swap width and height").click()
    assert web.holds()["size"] == "72x96"
    assert page.locator("#size option").all_inner_texts() == [*sizes, "72 × 96"], "one typed size"
    web.reload()
    assert web.holds()["size"] == "72x96"
    web.open_settings()
    page.get_by_label("Width", exact=True).fill("100")
    web.generate(PROMPT)
    expect(page.locator("#across")).to_be_focused()
    page.get_by_label("Width", exact=True).fill("")
    page.get_by_label("Height", exact=True).fill("")
    assert web.holds()["size"] == "auto"


def test_schedulers_have_usual_names_and_one_model_is_no_choice(web: Visit) -> None:
    expect(web.page.get_by_label("Model", exact=True)).to_be_hidden()
    assert "model" not in web.holds()
    web.generate(PROMPT, steps="2", scheduler="dpmpp_2m_karras")
    chosen = web.page.locator("#scheduler option:checked")
    expect(chosen).to_have_text("DPM++ 2M Karras")
    web.wait_for_pictures()
    web.page.locator("#thumbs button").first.click()
    expect(web.page.locator("#viewer-facts")).to_contain_text("DPM++ 2M Karras")


def test_rare_settings_are_folded_named_and_shown_if_they_are_wrong(web: Visit) -> None:
    negative = web.page.get_by_label("Negative prompt")
    expect(negative).to_be_visible()
    web.page.locator("#prompt").focus()
    web.page.keyboard.press("Tab")
    expect(negative).to_be_focused()
    web.page.locator("#more > summary").click()
    groups = web.page.locator("#groups summary")
    expect(groups).to_have_text(["Variation", "DeepCache", "Guidance", "Upscale"])
    expect(web.page.locator("#upscale")).to_be_hidden()
    groups.nth(3).click()
    web.page.fill("#upscale", "9")
    groups.nth(3).click()
    web.page.locator("#more > summary").click()
    expect(web.page.locator("#unusual")).to_have_text("Upscale")
    web.generate(PROMPT)
    expect(web.page.locator("#upscale")).to_be_focused()
    expect(web.page.locator("#upscale")).to_be_visible()
    web.set("seed", "7")
    web.set("steps", "1000")
    expect(web.page.locator("#unusual")).to_have_text("Steps, Seed, Upscale")
    web.page.click("#reset")
    expect(web.page.locator("#unusual")).to_have_text("")


def png(**texts: str) -> bytes:
    chunks, file = PngInfo(), io.BytesIO()
    for name, text in texts.items():
        chunks.add_text(name, text)
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=chunks)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "text", "left_out"),
    [
        ("parameters", A1111, "Left out"),
        ("prompt", json.dumps(COMFY), "Left out: node LoraLoader"),
    ],
)
def test_pictures_of_other_programs_give_their_settings(
    web: Visit, name: str, text: str, left_out: str
) -> None:
    web.page.fill("#prompt", "what was here")
    web.drop("theirs.png", png(**{name: text}))
    said = web.page.locator("#notices")
    expect(said).to_contain_text("The settings are those of theirs.png")
    expect(said).to_contain_text("Another program made it, so the picture will differ.")
    expect(said).to_contain_text(left_out)
    held = web.holds()
    assert held["prompt"] not in ("", "what was here") and held["steps"] in ("25", "30")
    assert held["seed"].isdigit() and "x" in held["size"] and float(held["guidance"]) > 1
