"""The web page's chat and its longer prompts, in a real browser on fake engines."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, expect

from sdxl.images import read_parameters
from tests.serve.llm.texts import SAID, FakeLlm, fake_speaker, listening
from tests.serve.servers import listening as without_chat
from tests.serve.service.browsers import View, Visit, visit


def say(web: Visit, text: str) -> None:
    web.page.click("#tab-chat")
    web.page.fill("#words", text)
    web.page.click("#send")


@pytest.mark.phone
def test_an_answer_comes_and_is_drawn(browser: Browser, view: View) -> None:
    with listening(fake_speaker()) as url, visit(browser, url, view) as web:
        say(web, "circle")
        turns = web.page.locator("#turns li")
        expect(turns.nth(0)).to_contain_text("circle")
        expect(turns.nth(1)).to_contain_text(SAID)
        assert web.violations() == []
        web.page.get_by_role("button", name="Draw this").click()
        expect(web.page.locator("#prompt")).to_have_value(SAID)
        web.wait_for_pictures()
        say(web, "and now")
        expect(turns).to_have_count(4)
        web.page.click("#chat-clear")
        expect(turns).to_have_count(0)


def test_the_prompt_helper_names_what_the_toy_model_cannot_draw(web: Visit) -> None:
    say(web, "a cat")
    expect(web.page.locator("#turns .hint")).to_contain_text("not “cat”.")
    assert web.violations() == []


def test_an_answer_can_be_stopped(browser: Browser, view: View) -> None:
    engine = FakeLlm(token_s=2.0)
    with listening(fake_speaker(engine)) as url, visit(browser, url, view) as web:
        say(web, "circle")
        web.page.click("#chat-stop")
        expect(web.page.locator("#turns li").nth(1)).to_contain_text("Stopped.")
        expect(web.page.locator("#send")).to_be_visible()


def test_a_failure_is_shown(browser: Browser, view: View) -> None:
    engine = FakeLlm()
    engine.fault = RuntimeError("broken")
    with listening(fake_speaker(engine)) as url, visit(browser, url, view) as web:
        say(web, "circle")
        expect(web.page.locator("#turns li").nth(1)).to_contain_text("The language model failed.")


def test_a_prompt_is_expanded_when_asked(browser: Browser, view: View) -> None:
    with listening(fake_speaker()) as url, visit(browser, url, view) as web:
        web.page.locator("[name=expand_prompt]").check()
        web.generate("circle", steps="4")
        web.wait_for_pictures()
        assert read_parameters(web.download())["prompt"] == SAID


def test_without_a_language_model_there_is_no_chat(browser: Browser, view: View) -> None:
    with without_chat() as (url, _), visit(browser, url, view) as web:
        expect(web.page.locator("#service")).to_have_attribute("data-state", "ready")
        expect(web.page.locator("#tabs")).to_be_hidden()
        expect(web.page.locator("[name=expand_prompt]")).to_be_hidden()
