"""Editing on the web page, in a real browser on the whole service."""

from __future__ import annotations

import hashlib
from typing import Any

from PIL import Image
from playwright.sync_api import FilePayload, expect

from sdxl.images import read_parameters
from tests.sdxl.test_source import animated, saved
from tests.serve.service.browsers import Visit

PROMPT = "a yellow star on a blue background"
SOURCE = "#drop-source"


def photo(width: int = 168, height: int = 96) -> bytes:
    return saved(Image.effect_noise((width, height), 60).convert("RGB"))


def made(web: Visit) -> dict[str, Any]:
    """Return the newest picture's metadata."""
    return read_parameters(web.download())


def digest(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def test_a_dropped_picture_is_made_anew_as_strongly_as_asked_and_seen_forming(web: Visit) -> None:
    file = photo()
    web.drop("photo.png", file, SOURCE)
    expect(web.page.locator("#source-name")).to_have_text("photo.png")
    expect(web.page.locator("#source-size")).to_have_text("168 × 96")
    expect(web.page.locator("#strength")).to_have_attribute("placeholder", "0.8")
    assert web.violations() == []
    web.generate(PROMPT, steps="40", strength="0.5")
    web.wait_for_pictures()
    stored = made(web)
    assert (stored["strength"], stored["image_sha256"]) == (0.5, digest(file))
    assert (stored["width"], stored["height"]) == (168, 96)
    assert len(set(web.page.evaluate("previews"))) >= 2


def test_a_result_is_upscaled_and_edited_before_a_picture_from_words(web: Visit) -> None:
    pictures = web.page.locator("#thumbs li")
    web.generate(PROMPT, steps="5", seed="3")
    web.wait_for_pictures()
    first = web.download()
    web.page.locator("#thumbs button").click()
    web.page.get_by_role("button", name="Upscale", exact=True).click()
    expect(pictures).to_have_count(2)
    second = web.download()
    upscaled = read_parameters(second)
    assert [upscaled[name] for name in ("prompt", "seed", "steps")] == [PROMPT, 3, 5]
    assert (upscaled["width"], upscaled["height"]) == (256, 256)
    assert (upscaled["strength"], upscaled["image_sha256"]) == (0.2, digest(first))
    web.page.get_by_role("button", name="Edit this").click()
    expect(web.page.locator("#source-size")).to_have_text("256 × 256")
    expect(web.page.locator("#source-name")).to_have_text(PROMPT)
    expect(web.page.locator("#prompt")).to_be_focused()
    web.generate("a red ring on a blue background", upscale="", upscale_strength="")
    expect(pictures).to_have_count(3)
    assert made(web)["image_sha256"] == digest(second)
    web.page.click("#source-remove")
    expect(web.page.locator("#strength")).to_be_hidden()
    web.generate(PROMPT, steps="4")
    expect(pictures).to_have_count(4)
    assert "image_sha256" not in made(web)


def test_an_upscaled_picture_is_shown_in_its_larger_size_and_a_result_is_upscaled(
    web: Visit,
) -> None:
    web.generate(PROMPT, steps="5", seed="3", upscale="1.5")
    web.wait_for_pictures()
    first = made(web)
    assert (first["width"], first["upscale"], first["upscale_strength"]) == (128, 1.5, 0.4)
    web.page.locator("#thumbs button").first.click()
    expect(web.page.locator("#viewer-facts")).to_contain_text("192 × 192")
    natural = "element => [element.naturalWidth, element.naturalHeight]"
    assert web.page.locator("#viewer-image").evaluate(natural) == [192, 192]
    web.page.keyboard.press("Escape")
    web.page.get_by_role("button", name="Edit this").click()
    web.generate(PROMPT, steps="5", upscale="2")
    expect(web.page.locator("#thumbs li")).to_have_count(2)
    stored = made(web)
    assert (stored["width"], stored["height"], stored["strength"]) == (256, 256, 0.4)
    assert web.violations() == []
    web.page.click("#source-remove")
    web.generate(PROMPT, steps="5", upscale="1.5", upscaler="latent", upscale_strength="0.7")
    expect(web.page.locator("#thumbs li")).to_have_count(3)
    web.page.locator("#thumbs button").first.click()
    web.page.get_by_role("button", name="Upscale", exact=True).click()
    expect(web.page.locator("#thumbs li")).to_have_count(4)
    assert made(web)["strength"] == 0.2


def test_a_source_outlives_a_reload_and_comes_back_with_its_result_s_settings(web: Visit) -> None:
    file = photo()
    chosen = FilePayload(name="chosen.png", mimeType="image/png", buffer=file)
    web.page.set_input_files("#source-file", chosen)
    # The message appears when the picture is on disk.
    expect(web.page.locator("#announcer")).to_have_text("chosen.png is the source now.")
    web.reload()
    expect(web.page.locator("#source-name")).to_have_text("chosen.png")
    web.generate(PROMPT, steps="8", strength="0.25", seed="5")
    web.wait_for_pictures()
    first = web.download()
    web.page.click("#source-remove")
    web.reload()
    expect(web.page.locator("#held")).to_be_hidden()
    web.drop("result.png", first)
    expect(web.page.locator("#notices")).to_contain_text("Generate makes the same picture.")
    expect(web.page.locator("#source-name")).to_contain_text("result.png was made from")
    web.generate()
    expect(web.page.locator("#thumbs li")).to_have_count(2)
    assert web.download() == first


def test_a_pasted_picture_is_the_source_and_other_files_are_refused(web: Visit) -> None:
    web.drop("words.txt", b"no picture", SOURCE)
    expect(web.page.get_by_role("alert")).to_contain_text("words.txt is not a picture")
    web.paste(photo(64, 64))
    expect(web.page.locator("#source-name")).to_have_text("the pasted picture")
    expect(web.page.locator("#source-size")).to_have_text("64 × 64")
    # The browser can read an animation, and the service refuses it.
    web.expected = ("400",)
    web.drop("film.webp", animated("WEBP"), SOURCE)
    expect(web.page.locator("#source-name")).to_have_text("film.webp")
    web.generate(PROMPT)
    expect(web.page.get_by_role("alert")).to_contain_text("must be a single picture")
    expect(web.page.locator("#choose")).to_be_focused()
    assert web.violations() == []
