"""The page's list of ControlNets, each with the picture of its map."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect

from sdxl.catalogue import Catalogue
from sdxl.images import read_parameters
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline
from tests.sdxl.control_nets import random_control
from tests.sdxl.test_editing import drawing
from tests.serve.servers import listening
from tests.serve.service.browsers import Visit

MAP: Any = {"name": "drawing.png", "mimeType": "image/png", "buffer": file_of(drawing(128, 128))}
LIST = "ControlNets"


@pytest.fixture(scope="module")
def address(mini: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("controlnets")
    for seed, name in enumerate(("depth", "edges")):
        random_control(seed).save_pretrained(folder / name)
    catalogue: Any = Catalogue(control_folders=[folder])
    with listening(replace(mini, catalogue=catalogue)) as (url, _):
        yield url


def add(web: Visit, name: str) -> None:
    web.page.get_by_label(LIST).select_option(name)
    with web.page.expect_file_chooser() as chooser:
        web.page.get_by_role("button", name="Add map…").click()
    chooser.value.set_files(MAP)
    expect(web.page.get_by_role("button", name=f"Remove {name}")).to_be_visible()


def test_picked_maps_are_in_the_picture_and_come_back_with_it(listed: Visit) -> None:
    page = listed.page
    add(listed, "edges")
    page.get_by_label("Strength of edges", exact=True).fill("0.7")
    page.get_by_text("Details").click()
    before = page.get_by_alt_text("The map of edges").get_attribute("src")
    page.get_by_label("Preprocessor").select_option("canny")
    shown = page.get_by_alt_text("The map of edges")
    expect(shown).not_to_have_attribute("src", before or "")
    page.get_by_label("End", exact=True).fill("0.5")
    page.get_by_label("End", exact=True).press("Tab")
    expected = [{"name": "edges", "image": "", "strength": 0.7, "preprocess": "canny", "end": 0.5}]
    assert listed.holds_pictures("controls") == expected
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not listed.violations()
    listed.reload()
    assert listed.holds_pictures("controls") == expected
    listed.generate("a red circle", steps="2")
    listed.wait_for_pictures()
    (stored,) = read_parameters(listed.download())["controls"]
    assert (stored["name"], stored["strength"], stored["preprocess"]) == ("edges", 0.7, "canny")
    page.click("#reset")
    assert listed.holds_pictures("controls") == []
    page.locator("#thumbs button").first.click()
    expect(page.locator("#viewer-facts")).to_contain_text("edges 0.7")
    page.click("#viewer [data-do=use]")
    expect(page.get_by_alt_text("The map of edges")).to_be_visible()
    assert {"name": "edges", "preprocess": "canny"}.items() <= listed.holds_pictures("controls")[
        0
    ].items()


def test_a_map_of_other_proportions_is_refused_at_the_list(listed: Visit) -> None:
    add(listed, "depth")
    listed.expected = ("400",)
    listed.generate("a ring", steps="2", size="152x104")
    expect(listed.page.get_by_role("alert")).to_contain_text("its map is 128x128")
    listed.page.get_by_role("button", name="Remove depth").click()
    expect(listed.page.get_by_role("alert")).to_have_count(0)
