"""The web page's chat, in a real browser on fake engines."""

from __future__ import annotations

from playwright.sync_api import Browser, expect

from tests.serve.llm.texts import SAID, FakeLlm, fake_speaker, listening
from tests.serve.servers import listening as without_chat
from tests.serve.service.browsers import View, Visit, visit


def say(web: Visit, text: str) -> None:
    web.page.click("#tab-chat")
    web.page.fill("#words", text)
    web.page.click("#send")


def test_an_answer_is_drawn_or_stopped_and_a_failure_is_shown(browser: Browser, view: View) -> None:
    engine = FakeLlm()
    with listening(fake_speaker(engine)) as url, visit(browser, url, view) as web:
        say(web, "circle")
        turns = web.page.locator("#turns li")
        expect(turns.nth(0)).to_contain_text("circle")
        expect(turns.nth(1)).to_contain_text(SAID)
        assert web.violations() == []
        web.page.get_by_role("button", name="Draw this").click()
        expect(web.page.locator("#prompt")).to_have_value(SAID)
        web.wait_for_pictures()
        engine.token_s = 2.0
        say(web, "and now")
        expect(turns).to_have_count(4)
        web.page.click("#chat-stop")
        expect(turns.nth(3)).to_contain_text("Stopped.")
        expect(web.page.locator("#send")).to_be_visible()
        engine.token_s, engine.fault = 0.0, RuntimeError("broken")
        say(web, "circle")
        expect(turns.nth(5)).to_contain_text("The language model failed.")
        web.page.click("#chat-clear")
        expect(turns).to_have_count(0)


def test_without_a_language_model_and_loras_there_is_no_chat_and_no_list(
    browser: Browser, view: View
) -> None:
    with without_chat() as (url, _), visit(browser, url, view) as web:
        expect(web.page.locator("#service")).to_have_attribute("data-state", "ready")
        expect(web.page.locator("#tabs")).to_be_hidden()
        expect(web.page.locator("[name=expand_prompt]")).to_be_hidden()
        expect(web.page.locator("#pickers")).to_be_hidden()
