"""Comparisons on the web page: two settings in a grid; DeepCache off and on, timed when warm."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect

from sdxl.images import encode, read_parameters
from sdxl.params import GenerationParams
from tests.serve.servers import GENERATE, listening
from tests.serve.service.browsers import View, Visit, visit
from tests.serve.workers import fake_pipeline

PROMPT = "a red circle on a blue background"
RUNS = 5
COLD = (9.0, 1.0)


def told_times(page: Page, seconds: Sequence[float]) -> list[dict[str, Any]]:
    """Let the service report these times for its pictures; return a list of its requests."""
    asked: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        params = GenerationParams(PROMPT, seed=int(body["seed"]), width=128, height=128)
        file = encode(np.zeros((128, 128, 3), np.uint8), "png", params.as_dict())
        event = {
            "type": "image_generation.completed",
            "image_index": 0,
            "b64_json": base64.b64encode(file).decode(),
            # Waiting for other pictures does not count.
            "timings": {"total_s": seconds[len(asked)] + 3, "queue_s": 3},
        }
        asked.append(body)
        text = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        route.fulfill(content_type="text/event-stream", body=text)

    page.route(f"**{GENERATE}", answer)
    return asked


def in_turn(off: Sequence[float], on: Sequence[float]) -> list[float]:
    """Return the cold pair, then the warm pairs."""
    return [*COLD, *(each for pair in zip(off, on, strict=True) for each in pair)]


RUNS_AND_WORDS = (
    (
        (0.5, 0.5, 0.4, 0.6, 7.0),
        (0.25, 0.2, 0.3, 0.25, 0.9),
        "2.0 times as fast with DeepCache: 0.25\xa0s against 0.50\xa0s, medians of 5 warm runs "
        "each; faster in 5 of 5 pairs.",
    ),
    (
        (0.5, 0.5, 0.5, 0.5, 0.1),
        (0.4, 0.4, 0.4, 0.6, 0.4),
        "1.3 times as fast with DeepCache: 0.40\xa0s against 0.50\xa0s, medians of 5 warm runs "
        "each; faster in 3 of 5 pairs.",
    ),
    (
        (0.5, 0.5, 0.5, 0.5, 0.5),
        (0.49, 0.49, 0.49, 0.51, 0.51),
        "no faster with DeepCache: 0.49\xa0s against 0.50\xa0s, medians of 5 warm runs each; "
        "faster in 3 of 5 pairs.",
    ),
)


def test_reported_times_come_from_warm_runs_only(web: Visit) -> None:
    web.page.fill("#prompt", PROMPT)
    for count, (off, on, expected) in enumerate(RUNS_AND_WORDS, 1):
        asked = told_times(web.page, in_turn(off, on))
        web.page.click("#compare")
        expect(web.page.locator("#line")).to_have_text(f"The same seed, {expected}")
        assert [body["cache_interval"] for body in asked] == [1, 2] * (1 + RUNS)
        assert len({body["seed"] for body in asked}) == 1
        # Previews take time, and clients of the API have none.
        assert [body["partial_images"] for body in asked] == [3] * 2 + [0] * 2 * RUNS
        expect(web.page.locator("#thumbs li")).to_have_count(2 * count)


@pytest.mark.phone
def test_both_pictures_lie_in_one_place_under_a_slider(web: Visit, shots: Path) -> None:
    web.page.fill("#prompt", PROMPT)
    web.set("cache_interval", "3")
    web.page.click("#compare")
    wipe = web.page.locator("#stage .wipe")
    expect(wipe.locator("span")).to_have_text(["DeepCache off", "DeepCache every 3rd step"])
    places = [wipe.locator("img").nth(i).bounding_box() for i in range(2)]
    assert places[0] == places[1], "expected both in one place"
    expect(web.page.locator("#line")).to_contain_text("medians of 5 warm runs each")
    assert web.violations() == []
    if web.view.name == "desktop":
        web.page.locator("#stage").screenshot(path=shots / "web-compare.png")
    # The keyboard does the same as the mouse.
    slider = wipe.get_by_label("Visible part of DeepCache off")
    slider.focus()
    web.page.keyboard.press("End")
    before = "element => getComputedStyle(element).clipPath"
    assert wipe.locator(".before").evaluate(before) in ("inset(0px)", "inset(0px 0% 0px 0px)")
    box = slider.bounding_box()
    assert box
    web.page.mouse.click(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    assert 15 <= float(slider.input_value()) <= 35, slider.input_value()
    if web.view.name == "phone":
        expect(slider).to_be_in_viewport()
    on = read_parameters(web.download())
    assert on["cache_interval"] == 3
    web.page.locator("#thumbs button").nth(1).click()
    facts = web.page.locator("#viewer-facts")
    expect(facts).to_contain_text("off")
    expect(facts).to_contain_text(str(on["seed"]))


@pytest.mark.phone
def test_one_or_two_settings_are_compared_and_two_make_one_picture(web: Visit) -> None:
    page, thumbs = web.page, web.page.locator("#thumbs li")
    compare, generate = (page.locator(name).bounding_box() for name in ("#compare", "#generate"))
    assert compare and generate
    assert compare["width"] < 0.8 * generate["width"], "expected a lesser button"
    colour = page.locator("#compare").evaluate("e => getComputedStyle(e).backgroundColor")
    assert colour == "rgba(0, 0, 0, 0)", f"expected no background, got {colour}"
    asked = told_times(page, [1.0] * 8)
    page.fill("#prompt", PROMPT)
    page.get_by_role("button", name="Compare settings…").click()
    columns, values = page.get_by_label("Columns"), page.locator("#values-0")
    columns.select_option("Prompt")
    values.fill("a red circle, large\na blue ring")
    page.get_by_role("button", name="Make them").click()
    titles = page.locator("#stage figcaption strong")
    expect(titles).to_have_text(["a red circle, large", "a blue ring"])
    expect(thumbs).to_have_count(2)

    page.get_by_role("button", name="Compare settings…").click()
    columns.select_option("Steps")
    # First the form's numbers.
    expect(values).to_have_value("20")
    values.fill("4, 1001")
    page.get_by_role("button", name="Make them").click()
    expect(values).to_be_focused()
    assert "Steps 1001" in values.evaluate("element => element.validationMessage")
    values.fill("4, 8 12")
    page.get_by_label("Rows", exact=True).select_option("Scheduler")
    page.locator("#values-1").select_option(["euler", "dpmpp_2m"])
    assert web.violations() == []
    page.locator("#values-1").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    save = page.get_by_role("button", name="Download as one picture")
    expect(page.locator(".grid > b")).to_have_text(["", "Steps 4", "Steps 8", "Steps 12"])
    expect(page.locator(".grid > strong")).to_have_text(["Scheduler Euler", "Scheduler DPM++ 2M"])
    with page.expect_download() as coming:
        save.click()
    expected = [(steps, scheduler) for scheduler in ("euler", "dpmpp_2m") for steps in (4, 8, 12)]
    assert [(body["steps"], body["scheduler"]) for body in asked[2:]] == expected
    assert len({body["seed"] for body in asked[2:]}) == 1
    assert web.violations() == []
    with Image.open(coming.value.path()) as sheet:
        assert sheet.width > 3 * 128 and 2 * 128 < sheet.height < 3 * 128, sheet.size
    expect(thumbs).to_have_count(8)


def test_a_cancelled_comparison_still_shows_its_pictures(browser: Browser, view: View) -> None:
    with listening(fake_pipeline(tick_s=0.02)) as (url, _), visit(browser, url, view) as web:
        web.page.fill("#prompt", PROMPT)
        web.page.click("#compare")
        expect(web.page.locator("#line")).to_contain_text("Now both are timed: run 1 of 5.")
        web.page.click("#cancel")
        expect(web.page.locator("#line")).to_have_text("Cancelled.")
        expect(web.page.locator("#stage .wipe")).to_be_visible()
        expect(web.page.locator("#thumbs li")).to_have_count(2)
        expect(web.page.locator("#generate")).to_have_text("Generate")
