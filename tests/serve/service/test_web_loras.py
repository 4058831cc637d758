"""The page's list of LoRAs, on a model that has some and on one that has none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from sdxl.images import read_parameters
from sdxl.places import LORAS
from tests.serve.servers import listening
from tests.serve.service.browsers import View, Visit, visit
from tests.serve.workers import with_loras


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with listening(with_loras(LORAS)) as (url, _):
        yield url


@pytest.fixture
def styled(browser: Browser, address: str, view: View) -> Iterator[Visit]:
    with visit(browser, address, view) as found:
        expect(found.page.get_by_label("LoRAs")).to_be_visible()
        yield found


def add(web: Visit, name: str) -> None:
    web.page.get_by_label("LoRAs").select_option(name)
    web.page.get_by_role("button", name="Add", exact=True).click()


@pytest.mark.phone
def test_picked_loras_are_in_the_picture_and_come_back_with_it(styled: Visit) -> None:
    page = styled.page
    add(styled, "hollow")
    # The weight is selected, so that a person types it at once.
    page.keyboard.type("0.75")
    add(styled, "outlined")
    add(styled, "few_steps")
    slider = page.get_by_label("Weight of outlined, as a slider")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Remove few_steps").click()
    assert styled.holds()["loras"] == "hollow:0.75,outlined:0.95"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not styled.violations()
    styled.reload()
    assert styled.holds()["loras"] == "hollow:0.75,outlined:0.95"
    expect(page.get_by_label("Weight of outlined", exact=True)).to_have_value("0.95")
    styled.generate("a ring <lora:few_steps:0.5:1>", steps="4")
    styled.wait_for_pictures()
    stored = {each["name"]: each["weight"] for each in read_parameters(styled.download())["loras"]}
    assert stored == {"hollow": 0.75, "outlined": 0.95, "few_steps": 1.0}
    page.click("#reset")
    assert styled.holds()["loras"] == ""
    page.locator("#thumbs button").first.click()
    expect(page.locator("#viewer-facts")).to_contain_text("hollow:0.75, outlined:0.95")
    page.click("#viewer [data-do=use]")
    assert styled.holds()["loras"] == "hollow:0.75,outlined:0.95,few_steps:1:0.5"
    assert styled.holds()["prompt"] == "a ring"


def test_a_lora_that_is_gone_is_refused_at_the_list(styled: Visit) -> None:
    styled.page.evaluate("localStorage.setItem('settings', JSON.stringify({ loras: 'gone:1' }))")
    styled.reload()
    styled.expected = ("400",)
    styled.generate("a ring", steps="4")
    expect(styled.page.get_by_role("alert")).to_contain_text("must name LoRAs of the model")
    styled.page.get_by_role("button", name="Remove gone").click()
    expect(styled.page.get_by_role("alert")).to_have_count(0)
    assert styled.holds()["loras"] == ""


def test_a_model_without_loras_has_no_list(browser: Browser, view: View) -> None:
    with listening() as (url, _), visit(browser, url, view) as web:
        expect(web.page.locator("[name=prompt]")).to_be_visible()
        expect(web.page.locator("#pickers")).to_be_hidden()
