"""The web page's notes on a prompt before and after sending it, and its first examples."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, expect

from sdxl.mini.scenes import SHAPES
from serve.front import form_routes
from serve.front.api import create_app
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.serve.servers import listening, listening_to
from tests.serve.service.browsers import VIEWS, View, Visit, pixels, visit
from tests.waiting import wait_until

PROMPT = "a red circle on a blue background"
MOST = 225
PROMPTS = "v1/images/prompts"
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


@pytest.fixture
def page(view: View, browser: Browser) -> Iterator[Visit]:
    """The page over fake engines with the embedded model's own tokenizers."""
    with listening() as (url, _), visit(browser, url, view) as web:
        web.expected = ("400",)
        yield web


def length(web: Visit) -> Locator:
    return web.page.locator("#prompt-length")


# -- tokens ---------------------------------------------------------------------------------


def test_tokens_are_counted_where_they_near_the_service_s_limit(page: Visit) -> None:
    page.page.fill("#prompt", "red " * 170)
    expect(length(page)).to_have_text(f"170 of {MOST} tokens")
    page.page.fill("#prompt", "red " * (MOST + 1))
    expect(length(page)).to_have_text(f"{MOST + 1} of {MOST} tokens: too long")
    assert page.violations() == []
    expect(length(page)).to_be_in_viewport()
    page.page.fill("#prompt", PROMPT)
    expect(length(page)).to_have_text("")
    # No request is sent while nobody types.
    asked = [url for url in page.asked if url.endswith(PROMPTS)]
    page.page.wait_for_timeout(1000)
    assert [url for url in page.asked if url.endswith(PROMPTS)] == asked


def test_tokens_are_counted_when_typing_pauses(browser: Browser) -> None:
    with listening() as (url, _), visit(browser, url, VIEWS[0]) as web:
        web.page.clock.install()
        web.reload()
        expect(web.page.locator("#service")).to_have_text("sdxl-mini")
        # Typing takes no time, even on a slow machine.
        web.page.clock.pause_at(web.page.evaluate("Date.now()") + 1000)
        before = sum(url.endswith(PROMPTS) for url in web.asked)
        web.page.locator("#prompt").press_sequentially("red " * 10)
        with web.page.expect_request(f"**/{PROMPTS}") as asked:
            web.page.clock.fast_forward(1000)
        assert asked.value.post_data_json == {"prompt": "red " * 10, "model": "sdxl-mini"}
        assert sum(url.endswith(PROMPTS) for url in web.asked) == before + 1


@pytest.mark.phone
def test_a_refusal_is_shown_beside_its_field_and_in_view_until_it_is_mended(page: Visit) -> None:
    page.generate("red " * 400)
    alert = page.page.get_by_role("alert")
    expect(alert).to_have_text(
        f"That cannot be made. prompt must have at most {MOST} tokens, got 400"
    )
    expect(alert).to_be_in_viewport(ratio=1)
    field = page.page.locator("#prompt")
    expect(field).to_be_focused()
    expect(field).to_be_in_viewport()
    boxes = [each.bounding_box() for each in (field, alert)]
    assert boxes[0] and boxes[1]
    gap = boxes[1]["y"] - (boxes[0]["y"] + boxes[0]["height"])
    assert 0 <= gap <= 80, f"{gap} pixels from the field to what is said of it"
    expect(field).to_have_attribute("aria-invalid", "true")
    assert field.get_attribute("aria-errormessage") == alert.get_attribute("id")
    assert page.violations() == []
    field.press("End")
    field.press("Backspace")
    expect(alert).to_have_count(0)
    page.generate(PROMPT, negative_prompt="red " * 400)
    alert = page.page.locator(".field:has(#negative_prompt) + .notice [role=alert]")
    expect(alert).to_contain_text("negative_prompt must have at most")
    expect(page.page.locator("#negative_prompt")).to_be_focused()
    expect(alert).to_be_in_viewport(ratio=1)
    page.generate(PROMPT, negative_prompt="", steps="4")
    page.wait_for_pictures()
    expect(page.page.get_by_role("alert")).to_have_count(0)
    expect(page.page.locator("[aria-invalid]")).to_have_count(0)


# -- how it begins --------------------------------------------------------------------------


@pytest.mark.phone
def test_examples_move_nothing_and_are_made_again(web: Visit) -> None:
    """The second example is made by keyboard alone."""
    shown = web.page.locator("#shown button")
    expect(shown).to_have_text(list(form_routes.EMBEDDED))
    expect(shown.locator("img")).to_have_count(len(form_routes.EMBEDDED))
    moved = web.page.evaluate(SHIFTS)
    total = sum(value for value, _ in moved)
    assert total <= MOST_SHIFT, f"moved {total:.3f}, allowed {MOST_SHIFT}: {moved}"
    for image in shown.locator("img").all():
        expect(image).to_be_visible()
        assert image.evaluate("element => element.decode().then(() => element.naturalWidth)") == 128
    words = web.page.locator("#stage")
    expect(words).to_contain_text("toy model of six shapes; for real SDXL start with --model ")
    picture = (
        shown.nth(1)
        .locator("img")
        .evaluate(
            """(image) => {
          const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
          const context = canvas.getContext("2d");
          context.drawImage(image, 0, 0);
          return [...context.getImageData(0, 0, canvas.width, canvas.height).data];
        }"""
        )
    )
    shown.nth(1).focus()
    web.page.keyboard.press("Enter")
    held = web.holds()
    assert (held["prompt"], held["seed"]) == (form_routes.EMBEDDED[1], str(form_routes.SEED))
    expect(web.page.locator("#generate")).to_be_focused()
    web.page.keyboard.press("Enter")
    web.wait_for_pictures()
    expect(web.page.locator("#shown")).to_have_count(0)
    made = pixels(web.download())
    expected = np.asarray(picture, np.float64).reshape(128, 128, 4)[..., :3]
    assert np.abs(made - expected).max() <= 2, "another picture than the one that was shown"


def test_the_empty_page_of_another_model_shows_only_words(
    browser: Browser, worker: Worker, view: View
) -> None:
    settings = ServeSettings(models=({"model": "/models/sdxl-of-mine"},))
    with listening_to(create_app([worker], settings)) as url, visit(browser, url, view) as web:
        expect(web.page.locator("#service")).to_have_text("sdxl-of-mine")
        expect(web.page.locator("#examples button")).to_have_text(list(form_routes.ANY))
        expect(web.page.locator("#shown button")).to_have_count(0)
        expect(web.page.locator("#toy")).to_be_hidden()
        assert web.violations() == []
        web.page.locator("#examples button").first.click()
        assert web.holds()["prompt"] == form_routes.ANY[0]
        expect(web.page.locator("#prompt-hint")).to_have_text("")


def test_the_toy_model_says_what_it_draws_and_surprises_with_it(web: Visit) -> None:
    hint = web.page.locator("#prompt-hint")
    web.page.fill("#prompt", "a photo of a cat")
    expect(hint).to_contain_text("not “photo”, “cat”.")
    for shape in SHAPES:
        expect(hint).to_contain_text(shape)
    button = web.page.get_by_role("button", name="Surprise me")
    button.focus()
    offered = set()
    for _ in range(12):
        web.page.keyboard.press("Enter")
        offered.add(web.holds()["prompt"])
    assert len(offered) > 3 and all(re.search("|".join(SHAPES), each) for each in offered)
    expect(hint).to_have_text("")


# -- and then -------------------------------------------------------------------------------


@pytest.mark.phone
def test_a_long_prompt_leaves_room_and_generate_stays_in_reach(web: Visit) -> None:
    web.page.fill("#prompt", "a red circle " * 300)
    box = web.page.locator("#prompt").bounding_box()
    assert box and web.page.viewport_size
    assert box["height"] <= 0.41 * web.page.viewport_size["height"]
    web.generate(PROMPT, steps="4")
    web.wait_for_pictures()
    web.page.evaluate("scrollTo(0, document.body.scrollHeight)")
    if web.view.name == "phone":
        expect(web.page.locator("#generate")).to_be_in_viewport(ratio=1)
        note = web.page.locator("#thumbs li").last.bounding_box()
        bar = web.page.locator(".actions").first.bounding_box()
        assert note and bar and note["y"] + note["height"] <= bar["y"], "the bar hides the gallery"


def test_the_embedded_language_model_expands_prompts_and_is_named_for_it(web: Visit) -> None:
    web.page.check("[name=expand_prompt]")
    web.generate("a star", steps="4")
    web.wait_for_pictures()
    web.page.locator("#thumbs button").click()
    facts = web.page.locator("#viewer-facts div")
    expect(facts.first).to_have_text(re.compile(r"^Typed\s*a star$"))
    expect(facts.nth(1)).to_contain_text("background")
    web.page.keyboard.press("Escape")
    web.page.get_by_role("tab", name="Prompt helper").click()
    expect(web.page.locator("#chat-title")).to_have_text("Prompt helper")
    web.page.locator("#chat-examples button").first.focus()
    web.page.keyboard.press("Enter")
    expect(web.page.locator(".turn[data-role=assistant]")).to_contain_text("ring")
    web.page.fill("#words", "a cat")
    web.page.click("#send")
    expect(web.page.locator("#turns .hint").last).to_contain_text("not “cat”.")
    assert web.violations() == []
    web.page.get_by_role("button", name="Draw this").first.click()
    expect(web.page.locator("#thumbs li")).to_have_count(2)


def test_noise_has_no_seams(browser: Browser) -> None:
    with listening() as (url, _), visit(browser, url, VIEWS[0]) as web:
        web.page.evaluate("""() => {
          const place = document.createElement("div");
          place.className = "frame";
          place.id = "noise";
          place.style = "position: fixed; inset: 0; width: 512px; height: 512px; z-index: 9";
          document.body.append(place);
        }""")
        place = web.page.locator("#noise")
        # It is painted after it is loaded.
        wait_until(lambda: np.ptp(pixels(place.screenshot())) > 0)
        noise = pixels(place.screenshot())
    for axis in (0, 1):
        steps = np.abs(np.diff(noise, axis=axis)).mean(axis=(1 - axis, 2))
        assert len(steps) == 511
        seam, usual = steps[255], np.median(steps)
        assert seam < 1.5 * usual, f"{seam:.2f} across the seam, {usual:.2f} elsewhere"
