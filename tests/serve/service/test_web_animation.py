"""README's animation of the page: a prompt is typed, its pictures form, DeepCache is compared."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.serve.service.browsers import VIEWS, visit
from tests.serve.services import Service

PROMPT = "a yellow star on a black background"
SIZE = 920, 618
"""the size, scaled from a page of 1280×860"""
MOST_BYTES = 1_000_000
"""Every reader of README loads the file."""


@dataclass
class Film:
    page: Page
    frames: list[Image.Image] = field(default_factory=list)
    lasting_ms: list[int] = field(default_factory=list)

    def take(self, lasting_ms: int) -> None:
        """Take a frame of the page's top. If nothing changed, the last frame lasts longer."""
        self.page.evaluate("scrollTo(0, 0)")
        with Image.open(io.BytesIO(self.page.screenshot())) as image:
            frame = image.convert("RGB").resize(SIZE, Image.Resampling.LANCZOS)
        if self.frames and frame.tobytes() == self.frames[-1].tobytes():
            self.lasting_ms[-1] += lasting_ms
        else:
            self.frames.append(frame)
            self.lasting_ms.append(lasting_ms)

    def save(self, path: Path) -> None:
        first, *others = self.frames
        first.save(
            path,
            save_all=True,
            append_images=others,
            duration=self.lasting_ms,
            loop=0,
            quality=70,
            method=6,
        )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_animation_of_the_page_is_made(browser: Browser, running: Service, shots: Path) -> None:
    with visit(browser, running.url, VIEWS[0]) as web:
        film = Film(web.page)
        expect(web.page.locator("#shown img")).to_have_count(6)
        film.take(1200)
        for end in range(4, len(PROMPT) + 4, 4):
            web.page.fill("#prompt", PROMPT[:end])
            film.take(110)
        web.generate(PROMPT, pictures=4, steps="80", seed="11")
        web.page.evaluate("document.querySelector('#more').open = false")
        began_s = time.monotonic()
        while web.page.locator("#thumbs li").count() < 4:
            film.take(0)
            now_s = time.monotonic()
            film.lasting_ms[-1] += round(1000 * (now_s - began_s))
            began_s = now_s
        film.take(1800)
        web.generate(PROMPT, pictures=1, steps="20", cache_interval="3")
        web.wait_for_pictures()
        web.page.click("#compare")
        expect(web.page.locator("#line")).to_contain_text("medians")
        web.page.evaluate("document.querySelector('#more').open = false")
        film.take(900)
        slider = web.page.locator("#stage .wipe input")
        for place in (*range(50, 10, -5), *range(10, 90, 5), *range(90, 50, -5)):
            slider.fill(str(place))
            film.take(70)
        film.take(1500)
    assert len(film.frames) > 40
    path = shots / "web.webp"
    film.save(path)
    assert path.stat().st_size < MOST_BYTES
