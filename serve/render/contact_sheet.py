"""A contact sheet: many pictures with captions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
THUMBNAIL, MARGIN, GAP = 256, 24, 8
FONT_SIZE, LINE_HEIGHT, MAX_LINES = 15, 20, 3
PAPER, INK = (255, 255, 255), (40, 40, 40)


def contact_sheet(pictures: Sequence[tuple[Pixels, str]]) -> Pixels:
    """Arrange thumbnails in rows, close to 4:3."""
    font = ImageFont.load_default(FONT_SIZE)
    captions = [wrap(caption, font) for _, caption in pictures]
    lines = max(map(len, captions))
    columns = math.ceil(math.sqrt(len(pictures) * 4 / 3))
    rows = math.ceil(len(pictures) / columns)
    across = THUMBNAIL + MARGIN
    down = THUMBNAIL + GAP + lines * LINE_HEIGHT + MARGIN
    sheet = Image.new("RGB", (columns * across + MARGIN, rows * down + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    for place, (pixels, _) in enumerate(pictures):
        left, top = MARGIN + place % columns * across, MARGIN + place // columns * down
        picture = thumbnail(pixels)
        indent = (THUMBNAIL - picture.width) // 2, (THUMBNAIL - picture.height) // 2
        sheet.paste(picture, (left + indent[0], top + indent[1]))
        for number, line in enumerate(captions[place]):
            y = top + THUMBNAIL + GAP + number * LINE_HEIGHT
            draw.text((left + THUMBNAIL / 2, y), line, INK, font, anchor="ma")
    return np.asarray(sheet)


def thumbnail(pixels: Pixels) -> Image.Image:
    picture = Image.fromarray(pixels)
    scale = THUMBNAIL / max(picture.size)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def wrap(caption: str, font: Font) -> list[str]:
    """Wrap at words; an ellipsis replaces text that does not fit."""
    lines: list[str] = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= THUMBNAIL:
            lines[-1] = longer
        elif lines[-1]:
            lines.append(word)
        else:
            lines[-1] = word
    shown = [shorten(line, font) for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        shown[-1] = shorten(lines[MAX_LINES - 1] + " …", font)
    return shown


def shorten(line: str, font: Font) -> str:
    if font.getlength(line) <= THUMBNAIL:
        return line
    while line and font.getlength(line + "…") > THUMBNAIL:
        line = line[:-1]
    return line.rstrip(" …") + "…"
