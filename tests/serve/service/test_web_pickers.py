"""The page's lists of LoRAs and embeddings, ControlNets, and image prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from sdxl.catalogue import Catalogue
from sdxl.images import read_parameters
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline
from sdxl.places import CONTROLNETS, IP_ADAPTERS, LORAS
from tests.sdxl.test_editing import drawing
from tests.serve.servers import listening
from tests.serve.service.browsers import View, Visit, visit

DRAWING = file_of(drawing(128, 128))
DATA_URL = re.compile("^data:image/png;base64,")


@pytest.fixture(scope="module")
def address(mini: Pipeline) -> Iterator[str]:
    """A service with the embedded model's LoRAs, embedding, ControlNets and IP-Adapter."""
    catalogue = Catalogue([LORAS], [CONTROLNETS], [IP_ADAPTERS])
    with listening(replace(mini, catalogue=catalogue)) as (url, _):
        yield url


@pytest.fixture
def web(browser: Browser, address: str, view: View) -> Iterator[Visit]:
    with visit(browser, address, view) as found:
        expect(found.page.get_by_label("LoRAs")).to_be_visible()
        yield found


def add_lora(page: Page, name: str) -> None:
    page.get_by_label("LoRAs").select_option(name)
    page.get_by_role("button", name="Add", exact=True).click()


def add_map(page: Page, name: str) -> None:
    page.get_by_label("ControlNets").select_option(name)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add map…").click()
    chooser.value.set_files({"name": "map.png", "mimeType": "image/png", "buffer": DRAWING})
    expect(page.get_by_role("button", name=f"Remove {name}")).to_be_visible()


def picked(web: Visit) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the LoRAs, ControlNets and image prompts that the form holds, without pictures."""
    held = web.holds()
    controls, prompts = (
        [dict(each, image="") for each in json.loads(held[name] or "[]")]
        for name in ("controls", "image_prompts")
    )
    return held["loras"], controls, prompts


def test_what_is_picked_makes_the_picture_and_comes_back_with_it(web: Visit) -> None:
    page = web.page
    add_lora(page, "hollow")
    # The weight is selected, so that typing replaces it.
    page.keyboard.type("0.75")
    add_lora(page, "outlined")
    add_lora(page, "few_steps")
    page.get_by_label("Weight of outlined, as a slider").focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Remove few_steps").click()

    add_map(page, "edges")
    strength = page.get_by_label("Strength of edges", exact=True)
    strength.fill("0.7")
    shown = page.get_by_alt_text("The map of edges")
    before = shown.get_attribute("src")
    nets = page.locator("#controls-field")
    nets.get_by_text("Details").click()
    nets.get_by_label("Preprocessor").select_option("canny")
    expect(shown).not_to_have_attribute("src", before or "")
    nets.get_by_label("End", exact=True).fill("0.5")
    nets.get_by_label("End", exact=True).press("Tab")

    # Only visible lists take what is dropped.
    page.evaluate("document.getElementById('controls-field').hidden = true")
    web.drop("a.png", DRAWING, "#drop-prompt")
    places = "['drop-prompt', 'drop-map'].map((id) => document.getElementById(id).hidden)"
    assert page.evaluate(places) == [False, True]
    expect(page.get_by_alt_text("The picture of reference")).to_be_visible()
    page.get_by_label("Strength of reference", exact=True).fill("0.6")
    prompts = page.locator("#image_prompts-field")
    prompts.get_by_text("Details").click()
    prompts.get_by_label("Mode", exact=True).select_option("style")

    expected = (
        "hollow:0.75,outlined:0.95",
        [{"name": "edges", "image": "", "strength": 0.7, "preprocess": "canny", "end": 0.5}],
        [{"name": "reference", "image": "", "strength": 0.6, "mode": "style"}],
    )
    assert picked(web) == expected
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not web.violations()
    web.reload()
    assert picked(web) == expected
    expect(page.get_by_label("Weight of outlined", exact=True)).to_have_value("0.95")
    expect(page.get_by_alt_text("The picture of reference")).to_have_attribute("src", DATA_URL)

    web.generate("a ring <lora:few_steps:0.5:1>", steps="4")
    web.wait_for_pictures()
    stored = read_parameters(web.download())
    weights = {each["name"]: each["weight"] for each in stored["loras"]}
    assert weights == {"hollow": 0.75, "outlined": 0.95, "few_steps": 1.0}
    (control,), (prompt,) = stored["controls"], stored["image_prompts"]
    assert (control["name"], control["strength"], control["preprocess"]) == ("edges", 0.7, "canny")
    assert (prompt["name"], prompt["strength"], prompt["mode"]) == ("reference", 0.6, "style")

    page.click("#reset")
    assert picked(web) == ("", [], [])
    page.locator("#thumbs button").first.click()
    facts = page.locator("#viewer-facts")
    expect(facts).to_contain_text("hollow:0.75, outlined:0.95")
    expect(facts).to_contain_text("edges 0.7")
    page.click("#viewer [data-do=use]")
    expect(shown).to_be_visible()
    # The same map again, with another strength.
    strength.fill("0.3")
    page.locator("#thumbs button").first.click()
    page.click("#viewer [data-do=use]")
    expect(strength).to_have_value("0.7")
    expect(page.get_by_alt_text("The picture of reference")).to_be_visible()
    loras, (control,), (prompt,) = picked(web)
    assert loras == "hollow:0.75,outlined:0.95,few_steps:1:0.5"
    assert (control["name"], control["preprocess"], prompt["mode"]) == ("edges", "canny", "style")
    assert web.holds()["prompt"] == "a ring"
    # An embedding is a word of the prompt.
    add_lora(page, "dusk")
    assert web.holds()["prompt"] == "a ring, dusk"
    assert web.holds()["loras"] == loras
    expect(page.locator("#prompt")).to_be_focused()


def test_a_refused_entry_is_shown_at_its_list_until_it_is_removed(web: Visit) -> None:
    page, alert = web.page, web.page.get_by_role("alert")
    page.evaluate("localStorage.setItem('settings', JSON.stringify({ loras: 'gone:1' }))")
    web.reload()
    web.expected = ("400",)
    web.generate("a ring", steps="2", size="152x104")
    expect(alert).to_contain_text("must name LoRAs of the model")
    page.get_by_role("button", name="Remove gone").click()
    expect(alert).to_have_count(0)
    assert web.holds()["loras"] == ""
    add_map(page, "depth")
    web.generate()
    expect(alert).to_contain_text("its map is 128x128")
    page.get_by_role("button", name="Remove depth").click()
    expect(alert).to_have_count(0)
    kept = "async () => Object.keys(await (await import('/web/store.js')).keptWork('maps'))"
    assert len(page.evaluate(kept)) == 1
    web.reload()
    assert page.evaluate(kept) == []
