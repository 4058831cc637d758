"""The web page's error messages, in a real browser on fake engines."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.serve.servers import file_of_keys, listening
from tests.serve.service.browsers import View, Visit, visit
from tests.serve.workers import fake_pipeline

PROMPT = "a red circle on a blue background"


def test_with_keys_set_the_page_asks_for_one_and_a_429_says_when_to_try_again(
    browser: Browser, view: View, tmp_path: Path
) -> None:
    keys = file_of_keys(tmp_path, right="ann 1")
    with listening(keys=keys) as (url, _), visit(browser, url, view) as web:
        web.expected = ("401", "429")
        expect(web.page.locator("#key-dialog")).to_be_visible()
        assert web.violations() == []
        give_key(web, "wrong")
        expect(web.page.locator("#key-text")).to_contain_text("not valid")
        give_key(web, "right")
        expect(web.page.locator("#service")).to_have_text("sdxl-mini")
        web.generate(PROMPT, steps="2")
        web.wait_for_pictures()
        web.page.click("#generate")
        alert = web.page.get_by_role("alert")
        expect(alert).to_contain_text("The service is busy.")
        expect(alert).to_contain_text("1 images a minute")
        again = web.page.get_by_role("button", name="Try again in")
        expect(again).to_be_disabled()
        first = again.inner_text()
        expect(again).not_to_have_text(first)
        expect(web.page.locator("#generate")).to_have_text("Generate")
        assert web.violations() == []
        web.reload()
        expect(web.page.locator("#service")).to_have_text("sdxl-mini")
        expect(web.page.locator("#docs")).to_be_hidden()
        stored = web.page.evaluate("[sessionStorage['api-key'], localStorage['api-key'] ?? null]")
        assert stored == ["right", None], "needed: gone with the tab, unless asked to remember"
        web.page.click("#key")
        web.page.get_by_role("button", name="Not now").click()
        expect(web.page.locator("#notices")).to_contain_text("without a key")
        web.page.get_by_role("button", name="Enter a key").click()
        web.page.check("#key-remember")
        give_key(web, "right")
        expect(web.page.locator("#service")).to_have_text("sdxl-mini")
        assert web.page.evaluate("localStorage['api-key']") == "right"


def give_key(web: Visit, key: str) -> None:
    web.page.fill("#key-input", key)
    web.page.get_by_role("button", name="Use this key").click()


def test_a_lost_service_and_its_return_are_shown(browser: Browser, view: View) -> None:
    with listening() as (url, _), visit(browser, url, view) as web:
        web.expected = ("ERR_INTERNET_DISCONNECTED",)
        web.generate(PROMPT, steps="2")
        web.wait_for_pictures()
        web.page.context.set_offline(True)
        web.page.click("#generate")
        expect(web.page.get_by_role("alert")).to_contain_text("does not answer")
        expect(web.page.locator("#service")).to_have_text("no answer")
        assert web.violations() == []
        web.page.context.set_offline(False)
        expect(web.page.locator("#service")).to_have_text("sdxl-mini")
        web.page.get_by_role("button", name="Try again").click()
        web.wait_for_pictures()
        expect(web.page.locator("#thumbs li")).to_have_count(2)


def test_a_service_that_dies_while_it_draws_is_reported(browser: Browser, view: View) -> None:
    with listening(fake_pipeline(tick_s=0.1)) as (url, worker), visit(browser, url, view) as web:
        # The examples were still being made.
        web.expected = ("ERR_", "503")
        web.generate(PROMPT, steps="100")
        expect(web.page.locator("#stage .words")).to_contain_text("of 100")
        worker.close()
        expect(web.page.get_by_role("alert")).to_contain_text("shutting down")
        expect(web.page.locator("#stage .words")).to_have_text("not made")
        expect(web.page.locator("#generate")).to_have_text("Generate")


def test_the_page_waits_for_the_model_and_notices_when_it_goes_and_returns(
    browser: Browser, view: View
) -> None:
    with listening() as (url, worker):
        threads, worker._threads = worker._threads, None
        with visit(browser, url, view) as web:
            web.expected = ("503",)
            service = web.page.locator("#service")
            expect(service).to_have_text("not ready")
            worker._threads = threads
            expect(service).to_have_text("sdxl-mini")
            web.page.clock.install()
            web.reload()
            expect(service).to_have_text("sdxl-mini")
            worker._threads = None
            web.page.clock.fast_forward(11_000)
            expect(service).to_have_text("not ready")
            worker._threads = threads
            web.page.clock.fast_forward(3_000)
            expect(service).to_have_text("sdxl-mini")
