"""The page's list of LoRAs and embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from sdxl.images import read_parameters
from sdxl.places import LORAS
from tests.serve.servers import listening
from tests.serve.service.browsers import Visit
from tests.serve.workers import with_loras

LIST = "LoRAs"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with listening(with_loras(LORAS)) as (url, _):
        yield url


def add(web: Visit, name: str) -> None:
    web.page.get_by_label(LIST).select_option(name)
    web.page.get_by_role("button", name="Add", exact=True).click()


def test_picked_loras_are_in_the_picture_and_come_back_with_it(listed: Visit) -> None:
    page = listed.page
    add(listed, "hollow")
    # The weight is selected, so that typing replaces it.
    page.keyboard.type("0.75")
    add(listed, "outlined")
    add(listed, "few_steps")
    slider = page.get_by_label("Weight of outlined, as a slider")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Remove few_steps").click()
    assert listed.holds()["loras"] == "hollow:0.75,outlined:0.95"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not listed.violations()
    listed.reload()
    assert listed.holds()["loras"] == "hollow:0.75,outlined:0.95"
    expect(page.get_by_label("Weight of outlined", exact=True)).to_have_value("0.95")
    listed.generate("a ring <lora:few_steps:0.5:1>", steps="4")
    listed.wait_for_pictures()
    stored = {each["name"]: each["weight"] for each in read_parameters(listed.download())["loras"]}
    assert stored == {"hollow": 0.75, "outlined": 0.95, "few_steps": 1.0}
    page.click("#reset")
    assert listed.holds()["loras"] == ""
    page.locator("#thumbs button").first.click()
    expect(page.locator("#viewer-facts")).to_contain_text("hollow:0.75, outlined:0.95")
    page.click("#viewer [data-do=use]")
    assert listed.holds()["loras"] == "hollow:0.75,outlined:0.95,few_steps:1:0.5"
    assert listed.holds()["prompt"] == "a ring"
    # An embedding is a word of the prompt.
    add(listed, "dusk")
    assert listed.holds()["prompt"] == "a ring, dusk"
    assert listed.holds()["loras"] == "hollow:0.75,outlined:0.95,few_steps:1:0.5"
    expect(page.locator("#prompt")).to_be_focused()


def test_a_lora_that_is_gone_is_refused_at_the_list(listed: Visit) -> None:
    listed.page.evaluate("localStorage.setItem('settings', JSON.stringify({ loras: 'gone:1' }))")
    listed.reload()
    listed.expected = ("400",)
    listed.generate("a ring", steps="4")
    expect(listed.page.get_by_role("alert")).to_contain_text("must name LoRAs of the model")
    listed.page.get_by_role("button", name="Remove gone").click()
    expect(listed.page.get_by_role("alert")).to_have_count(0)
    assert listed.holds()["loras"] == ""
