"""The page's form: several models, sizes, folded groups, other programs' pictures, and a stable
layout."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Browser, Route, expect

from sdxl.checkpoint import MINI, Checkpoint
from sdxl.images import read_parameters
from sdxl.mini.scenes import SHAPES
from sdxl.pipeline import Pipeline
from serve.front.api import create_app
from serve.settings import ServeSettings
from tests.fakes import fake_engines
from tests.sdxl.test_infotext import A1111, COMFY
from tests.serve.servers import listening, listening_to
from tests.serve.service.browsers import VIEWS, View, Visit, visit
from tests.serve.workers import fake_pipeline, running, with_loras

PROMPT = "a red circle on a blue background"
SHIFTS = """() => new Promise((resolve) => {
  const moved = [];
  new PerformanceObserver((list) => {
    for (const { value, sources } of list.getEntries()) {
      moved.push([value, sources.map(({ node }) => node?.id || node?.className || node?.nodeName)]);
    }
  }).observe({ type: "layout-shift", buffered: true });
  setTimeout(() => resolve(moved), 200);
})"""
"""The moved elements, and Chromium's layout shift: moved share of the view times distance."""
MOST_SHIFT = 0.05
"""Web Vitals calls 0.1 good."""


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


def test_one_model_is_no_choice(web: Visit) -> None:
    expect(web.page.get_by_label("Model", exact=True)).to_be_hidden()
    assert "model" not in web.holds()


@pytest.mark.phone
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


def test_schedulers_have_the_names_that_people_know(web: Visit) -> None:
    web.generate(PROMPT, steps="2", scheduler="dpmpp_2m_karras")
    chosen = web.page.locator("#scheduler option:checked")
    expect(chosen).to_have_text("DPM++ 2M Karras")
    web.wait_for_pictures()
    web.page.locator("#thumbs button").first.click()
    expect(web.page.locator("#viewer-facts")).to_contain_text("DPM++ 2M Karras")


def test_the_negative_prompt_is_below_the_prompt_and_rare_settings_are_folded(web: Visit) -> None:
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
    web.generate(PROMPT)
    expect(web.page.locator("#upscale")).to_be_focused()


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


def test_cancel_all_leaves_an_empty_queue_and_a_tidy_stage(browser: Browser) -> None:
    with listening(fake_pipeline(tick_s=0.05)) as (url, _), visit(browser, url, VIEWS[0]) as web:
        page = web.page
        expect(page.locator("#cancel-all")).to_be_hidden()
        web.generate(PROMPT, pictures=4, steps="100")
        for prompt in ("a blue ring", "a white cross"):
            web.generate(prompt, steps="100")
        expect(page.locator("#queue button")).to_have_count(2)
        assert web.violations() == []
        page.get_by_role("button", name="Cancel all").click()
        expect(page.locator("#line")).to_have_text("Cancelled.")
        expect(page.locator("#queue button")).to_have_count(0)
        expect(page.locator("#generate")).to_have_text("Generate")
        expect(page.locator("#stage .tile")).to_have_count(0)
        expect(page.get_by_text("Say it, and watch it form")).to_be_visible()
        expect(page.locator("#cancel-all")).to_be_hidden()


def test_embeddings_are_offered_as_words_of_the_prompt(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "embeddings").mkdir()
    (tmp_path / "embeddings" / "neon.safetensors").write_bytes(bytes(8))
    with listening(with_loras(tmp_path)) as (url, _), visit(browser, url, VIEWS[0]) as web:
        page = web.page
        page.fill("#prompt", "a ring")
        page.get_by_label("LoRAs").select_option("neon")
        assert web.violations() == []
        page.get_by_role("button", name="Add", exact=True).click()
        assert (web.holds()["prompt"], web.holds()["loras"]) == ("a ring, neon", "")
        expect(page.locator("#prompt")).to_be_focused()


def test_the_toy_model_says_what_it_draws(web: Visit) -> None:
    web.page.fill("#prompt", "a photo of a cat")
    hint = web.page.locator("#prompt-hint")
    expect(hint).to_contain_text("not “photo”, “cat”.")
    for shape in SHAPES:
        expect(hint).to_contain_text(shape)


@pytest.mark.phone
def test_nothing_moves_after_the_first_paint(web: Visit) -> None:
    expect(web.page.locator("#shown img")).to_have_count(6)
    moved = web.page.evaluate(SHIFTS)
    total = sum(value for value, _ in moved)
    assert total <= MOST_SHIFT, f"moved {total:.3f}, allowed {MOST_SHIFT}: {moved}"
