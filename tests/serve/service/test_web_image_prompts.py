"""The page's list of image prompts, each with its picture and IP-Adapter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect

from sdxl.catalogue import Catalogue
from sdxl.images import read_parameters
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline
from tests.sdxl.image_adapters import PLAIN, PLUS, write_adapters
from tests.sdxl.test_editing import drawing
from tests.serve.servers import listening
from tests.serve.service.browsers import Visit

PICTURE: Any = {"name": "a.png", "mimeType": "image/png", "buffer": file_of(drawing(128, 128))}

DATA_URL = re.compile("^data:image/png;base64,")
LIST = "Image prompts"


@pytest.fixture(scope="module")
def address(mini: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_adapters(tmp_path_factory.mktemp("ip_adapters"))
    with listening(replace(mini, catalogue=Catalogue(image_folders=[folder]))) as (url, _):
        yield url


def test_picked_pictures_prompt_and_come_back_with_the_picture(listed: Visit) -> None:
    page = listed.page
    page.get_by_label(LIST).select_option(PLUS)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add picture…").click()
    chooser.value.set_files(PICTURE)
    page.get_by_label(f"Strength of {PLUS}", exact=True).fill("0.7")
    page.get_by_text("Details").click()
    page.get_by_label("Mode", exact=True).select_option("style")
    assert listed.holds_pictures("image_prompts") == [
        {"name": PLUS, "image": "", "strength": 0.7, "mode": "style"}
    ]
    expect(page.get_by_alt_text(f"The picture of {PLUS}")).to_have_attribute("src", DATA_URL)
    assert not listed.violations()
    listed.generate("a red circle", steps="2")
    listed.wait_for_pictures()
    (stored,) = read_parameters(listed.download())["image_prompts"]
    assert (stored["name"], stored["strength"], stored["mode"]) == (PLUS, 0.7, "style")
    page.click("#reset")
    assert listed.holds_pictures("image_prompts") == []
    page.locator("#thumbs button").first.click()
    page.click("#viewer [data-do=use]")
    expect(page.get_by_alt_text(f"The picture of {PLUS}")).to_be_visible()
    assert listed.holds_pictures("image_prompts")[0]["mode"] == "style"


def test_a_dropped_picture_is_an_image_prompt(listed: Visit) -> None:
    page = listed.page
    expect(page.get_by_label("ControlNets")).to_be_hidden()
    listed.drop("a.png", PICTURE["buffer"], "#drop-prompt")
    places = "['drop-prompt', 'drop-map'].map((id) => document.getElementById(id).hidden)"
    assert page.evaluate(places) == [False, True]
    expect(page.get_by_alt_text(f"The picture of {PLUS}")).to_be_visible()
    assert listed.holds_pictures("image_prompts") == [{"name": PLUS, "image": ""}]
    assert PLAIN in page.get_by_label(LIST).inner_text()
