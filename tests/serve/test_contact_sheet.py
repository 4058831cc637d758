"""A contact sheet shows every picture and every caption."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import ImageFont

from serve.render.contact_sheet import FONT_SIZE, MAX_LINES, PAPER, THUMBNAIL, contact_sheet, wrap

FONT = ImageFont.load_default(FONT_SIZE)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_sheet_shows_every_picture_at_its_full_size(count: int) -> None:
    colours = [(20 * i + 10, 255 - 20 * i, 99) for i in range(count)]
    pictures = [(np.full((16, 32, 3), colour, np.uint8), "a caption") for colour in colours]
    sheet = contact_sheet(pictures)
    for colour in colours:
        assert (sheet == colour).all(axis=-1).sum() == THUMBNAIL * THUMBNAIL // 2


def test_a_caption_is_drawn_below_its_picture() -> None:
    pixels = np.full((128, 128, 3), PAPER, np.uint8)
    plain, captioned = (contact_sheet([(pixels, text)]) for text in (" ", "a red circle"))
    changed = np.argwhere((plain != captioned).any(axis=-1))
    assert len(changed) and changed[:, 0].min() > THUMBNAIL


@pytest.mark.parametrize("caption", ["", "word", "many words " * 40, "w" * 400, "日本語 " * 50])
def test_captions_stay_in_their_column(caption: str) -> None:
    lines = wrap(caption, FONT)
    assert 1 <= len(lines) <= MAX_LINES
    assert max(FONT.getlength(line) for line in lines) <= THUMBNAIL


def test_a_shortened_caption_is_marked() -> None:
    assert wrap("many words " * 40, FONT)[-1].endswith("…")
    assert wrap("a few words", FONT) == ["a few words"]
