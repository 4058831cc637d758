"""The gallery of the web page: removal, favourites, several pictures together, and blurred ones."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from sdxl.images import Pixels, read_parameters
from serve.front.api import create_app
from serve.settings import ServeSettings
from serve.worker.safety import Safety
from tests.serve.servers import listening_to
from tests.serve.service.browsers import View, Visit, visit
from tests.serve.workers import running

PROMPTS = ("a red circle", "a green star", "a blue ring")


LATE = """
const getAll = IDBObjectStore.prototype.getAll;
IDBObjectStore.prototype.getAll = function () {
  const wait = () => { if (!window.isRead) this.count().onsuccess = wait; };
  wait();
  return getAll.call(this);
};
"""
"""Reading the gallery takes until `isRead` is set."""


@pytest.fixture
def three(web: Visit) -> Visit:
    """The page with three pictures, the last of PROMPTS first."""
    for i, prompt in enumerate(PROMPTS, 1):
        web.generate(prompt, steps="2")
        expect(web.page.locator("#thumbs li")).to_have_count(i)
    return web


def zipped(web: Visit) -> dict[str, bytes]:
    with web.page.expect_download() as coming:
        web.page.get_by_role("button", name="Download zip").click()
    with zipfile.ZipFile(io.BytesIO(Path(coming.value.path()).read_bytes())) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_favourites_are_marked_shown_alone_and_kept_when_all_are_removed(three: Visit) -> None:
    page = three.page
    favourites = page.get_by_role("button", name="★ Favourites")
    expect(favourites).to_be_hidden()
    page.get_by_label("Favourite: a red circle").focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name="a green star").click()
    star = page.locator("#viewer [data-do=star]")
    expect(star).to_have_attribute("aria-pressed", "false")
    star.click()
    expect(star).to_have_text("★ Favourite")
    page.keyboard.press("Escape")
    three.reload()
    favourites.click()
    expect(page.locator("#thumbs .words")).to_have_text(["a green star", "a red circle"])
    assert three.violations() == []
    assert len(zipped(three)) == 2
    favourites.click()
    page.get_by_role("button", name="Remove all").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Remove 1 picture?")
    expect(dialog).to_contain_text("Favourites stay.")
    dialog.get_by_role("button", name="Remove").click()
    expect(page.locator("#thumbs li")).to_have_count(2)
    three.reload()
    expect(page.locator("#thumbs li")).to_have_count(2)


@pytest.mark.phone
def test_pictures_are_selected_downloaded_and_removed_together(three: Visit) -> None:
    page = three.page
    assert [read_parameters(file)["prompt"] for file in zipped(three).values()] == [*PROMPTS[::-1]]
    page.get_by_role("button", name="Select", exact=True).click()
    expect(page.get_by_role("button", name="Download zip")).to_be_disabled()
    # By the box and by the picture itself.
    page.get_by_label("Select: a red circle").check()
    page.locator("#thumbs button").first.click()
    expect(page.locator("#gallery-note")).to_have_text("2 selected")
    assert three.violations() == []
    files = zipped(three)
    names = [name.rpartition("-")[0] for name in files]
    assert names == ["001-a-blue-ring", "002-a-red-circle"]
    page.get_by_role("button", name="Remove selected").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.locator("#thumbs .words")).to_have_text(["a green star"])
    page.get_by_role("button", name="Select", exact=True).click()
    assert three.download() not in files.values()


def test_a_picture_gives_its_settings_and_its_removal_is_undone(web: Visit) -> None:
    pictures, thumbs = web.page.locator("#thumbs li"), web.page.locator("#thumbs button")
    web.generate("a red circle", steps="4", cache_interval="3")
    web.wait_for_pictures()
    web.generate("a green star", steps="5", cache_interval="1")
    expect(pictures).to_have_count(2)
    thumbs.last.click()
    web.page.click("#viewer [data-do=use]")
    held = web.holds()
    assert (held["prompt"], held["steps"], held["cache_interval"]) == ("a red circle", "4", "3")
    assert held["seed"].isdigit()
    thumbs.first.click()
    web.page.keyboard.press("ArrowRight")
    expect(web.page.locator("#viewer-facts")).to_contain_text("a red circle")
    viewer, remove = web.page.locator("#viewer"), web.page.locator("#viewer [data-do=remove]")
    remove.click()
    expect(viewer.get_by_role("button", name="Undo")).to_be_in_viewport(ratio=1)
    assert web.violations() == []
    web.page.keyboard.press("Escape")
    undo = web.page.locator("#notices").get_by_role("button", name="Undo")
    undo.click()
    expect(pictures).to_have_count(2)
    thumbs.first.click()
    remove.click()
    remove.click()
    expect(viewer).to_be_hidden()
    expect(pictures).to_have_count(0)
    undo.click()
    web.reload()
    expect(pictures).to_have_count(1)


def test_a_picture_made_before_the_gallery_is_read_stays(web: Visit) -> None:
    pictures = web.page.locator("#thumbs .words")
    web.generate("a red circle", steps="2")
    expect(pictures).to_have_text(["a red circle"])
    web.page.add_init_script(LATE)
    web.reload()
    web.generate("a blue ring", steps="2")
    expect(pictures).to_have_text(["a blue ring"])
    web.page.evaluate("isRead = true")
    both = ["a blue ring", "a red circle"]
    expect(pictures).to_have_text(both)
    web.reload()
    web.page.evaluate("isRead = true")
    expect(pictures).to_have_text(both)


def test_a_blurred_picture_says_why(browser: Browser, view: View) -> None:
    def flag(pixels: Pixels, _: bool) -> bool:
        return bool(np.isfinite(pixels).all())

    with (
        running(safety=Safety("blur", flag)) as worker,
        listening_to(create_app([worker], ServeSettings())) as url,
        visit(browser, url, view) as web,
    ):
        web.generate("a red circle", steps="2")
        caption = web.page.locator("#stage figcaption")
        expect(caption).to_contain_text("Blurred: the safety checker flagged it")
        assert web.violations() == []
        web.reload()
        expect(web.page.locator("#thumbs .hint")).to_have_text("blurred as unsafe")
        web.page.locator("#thumbs button").click()
        expect(web.page.locator("#viewer-facts")).to_contain_text("the safety checker flagged it")
