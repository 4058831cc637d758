"""The web page's queue, its state after a reload, and easily overlooked details."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.serve.servers import listening
from tests.serve.service.browsers import VIEWS, View, Visit, visit
from tests.serve.workers import fake_pipeline
from tests.waiting import wait_until

PROMPT = "a red circle on a blue background"
OTHER = "a green star on a black background"


@pytest.fixture
def slow(browser: Browser) -> Iterator[Visit]:
    """The page on a service with slow steps."""
    with listening(fake_pipeline(tick_s=0.05)) as (url, _), visit(browser, url, VIEWS[0]) as web:
        yield web


def prompts(web: Visit) -> list[str]:
    """Return the prompts of the gallery, the newest first."""
    return web.page.locator("#thumbs .words").all_inner_texts()


def test_a_request_during_another_one_waits_and_can_be_removed(slow: Visit) -> None:
    slow.generate(PROMPT, steps="100")
    expect(slow.page.locator("#generate")).to_have_text("Add to the queue")
    for prompt in (OTHER, "a blue ring", "a white cross"):
        slow.generate(prompt, steps="2")
    waiting = slow.page.locator("#queue button")
    expect(waiting).to_have_text([f"{OTHER} ✕", "a blue ring ✕", "a white cross ✕"])
    assert slow.violations() == []
    slow.page.get_by_role("button", name="Remove from the queue: a blue ring").click()
    slow.page.keyboard.press("Escape")
    expect(slow.page.locator("#thumbs li")).to_have_count(2)
    assert prompts(slow) == ["a white cross", OTHER]
    expect(waiting).to_have_count(0)
    expect(slow.page.locator("#generate")).to_have_text("Generate")


def test_progress_is_shown_and_cancel_all_leaves_nothing(browser: Browser, view: View) -> None:
    with listening(fake_pipeline(tick_s=0.1)) as (url, worker), visit(browser, url, view) as web:
        page, line = web.page, web.page.locator("#line")
        cancel_all = page.get_by_role("button", name="Cancel all")
        expect(cancel_all).to_be_hidden()
        web.generate(PROMPT, pictures=4, steps="100")
        words = page.locator("#stage .words").first
        expect(words).to_contain_text("of 100")
        expect(words).to_contain_text("s left")
        assert float(page.locator("#stage progress").first.get_attribute("value") or 0) > 0
        expect(line).to_contain_text("all done in")
        for prompt in ("a blue ring", "a white cross"):
            web.generate(prompt, steps="100")
        expect(page.locator("#queue button")).to_have_count(2)
        cancel_all.click()
        expect(line).to_have_text("Cancelled.")
        expect(page.locator("#queue button")).to_have_count(0)
        expect(page.locator("#generate")).to_have_text("Generate")
        expect(page.locator("#stage .tile")).to_have_count(0)
        expect(page.get_by_text("Say it, and watch it form")).to_be_visible()
        expect(cancel_all).to_be_hidden()
        wait_until(lambda: worker.is_idle)
        assert page.locator("#thumbs li").count() == 0


def test_a_reload_loses_no_order(slow: Visit) -> None:
    slow.generate(PROMPT, steps="60")
    slow.generate(OTHER, steps="2")
    expect(slow.page.locator("#stage .words")).to_contain_text("of 60")
    slow.reload()
    expect(slow.page.locator("#queue button")).to_have_text([f"{OTHER} ✕"])
    expect(slow.page.locator("#thumbs li")).to_have_count(2)
    assert prompts(slow) == [OTHER, PROMPT]
    slow.reload()
    expect(slow.page.locator("#thumbs li")).to_have_count(2)
    expect(slow.page.locator("#generate")).to_have_text("Generate")


def opened_without(page: Page, url: str, path: str) -> Callable[[], None]:
    """Open the page; its request for `path` waits until the returned function is called."""
    held: list[Route] = []
    page.route(f"**/{path}*", lambda route: held.append(route))
    page.goto(url, wait_until="commit")
    page.locator("#prompt").wait_for()

    def answer() -> None:
        while not held:
            page.wait_for_timeout(50)
        for route in held:
            route.continue_()

    return answer


def test_text_typed_before_the_page_is_complete_stays(slow: Visit) -> None:
    slow.page.locator("#prompt").fill("what another visit left")
    answer = opened_without(slow.page, slow.page.url, "web/main.js")
    slow.page.locator("#prompt").fill(PROMPT)
    answer()
    expect(slow.page.locator("#service")).to_have_text("sdxl-mini")
    expect(slow.page.locator("#prompt")).to_have_value(PROMPT)


def test_a_prompt_sent_before_the_service_has_said_its_name_is_made(slow: Visit) -> None:
    slow.page.locator("#prompt").fill("what another visit left")
    answer = opened_without(slow.page, slow.page.url, "v1/models")
    expect(slow.page.locator("#theme")).to_have_attribute("title", "Theme: auto")
    slow.page.locator("#prompt").fill(PROMPT)
    slow.page.keyboard.press("Control+Enter")
    answer()
    slow.wait_for_pictures()
    assert prompts(slow) == [PROMPT]
    expect(slow.page.locator("#prompt")).to_have_value(PROMPT)


@pytest.mark.parametrize(
    ("path", "prompt", "shown"),
    [
        ("v1/images/examples", PROMPT, "#examples .chip"),
        ("v1/images/prompts", "red " * 170, "#prompt-length:not(:empty)"),
    ],
)
def test_a_message_while_generate_is_pressed_does_not_move_the_button(
    slow: Visit, path: str, prompt: str, shown: str
) -> None:
    answer = opened_without(slow.page, slow.page.url, path)
    slow.wait_for_program()
    # Without a delay the examples appear before.
    expect(slow.page.locator("#examples .chip")).to_have_count(int("examples" not in path))
    slow.page.locator("#prompt").fill(prompt)
    slow.page.locator("#generate").hover()
    slow.page.mouse.down()
    # Long enough to be requested and shown.
    slow.page.wait_for_timeout(500)
    answer()
    slow.page.wait_for_timeout(500)
    slow.page.mouse.up()
    slow.wait_for_pictures()
    expect(slow.page.locator(shown)).to_have_count(1)
