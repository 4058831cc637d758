"""Encodes pictures for terminals: the protocols of kitty, iTerm and sixel."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sdxl.picture_files import file_of
from serve.render.terminal import ITERM, KITTY, SIXEL

USUAL_CELL = (10, 20)
"""A cell's pixels in terminals that do not report them."""
LONGEST_SENT = 384
"""The longer side of pictures that the terminal scales: fewer bytes over a slow connection."""
MAX_COLOURS = 256
END = b"\x1b\\"
"""Ends a picture, also one that was cut off; without a picture it does nothing."""
KITTY_CHUNK = 4096
BAND = 6
"""Rows of pixels in one row of sixels."""
BLANK = ord("?")
SHORTEST_RUN = 4
RUNS = re.compile(rb"([?-~])\1{%d,}" % (SHORTEST_RUN - 1))


@dataclass(frozen=True)
class Frame:
    """A picture's size on the screen in cells, and kitty's number for it."""

    columns: int
    rows: int
    cell: tuple[int, int]
    number: int = 1

    @property
    def size(self) -> tuple[int, int]:
        return self.columns * self.cell[0], self.rows * self.cell[1]


def frame_for(
    size: tuple[int, int], columns: int, rows: int, cell: tuple[int, int], number: int = 1
) -> Frame:
    """Return the largest frame with a picture's aspect ratio within these columns and rows."""
    cell = cell if all(cell) else USUAL_CELL
    scale = min(columns * cell[0] / size[0], rows * cell[1] / size[1])
    across, down = (
        max(1, round(side * scale / unit)) for side, unit in zip(size, cell, strict=True)
    )
    return Frame(min(across, columns), min(down, rows), cell, number)


def draw_picture(
    picture: Image.Image, protocol: str, frame: Frame, colours: int = MAX_COLOURS
) -> bytes:
    """Return the bytes that draw a picture at the cursor. Where the cursor ends depends on the
    protocol."""
    if protocol == SIXEL:
        return sixel(fitted(picture, frame.size), colours)
    longest = max(frame.size)
    factor = min(1.0, LONGEST_SENT / longest)
    small = fitted(picture, tuple(max(1, round(side * factor)) for side in frame.size))
    return {KITTY: kitty, ITERM: iterm}[protocol](file_of(small, compress_level=1), frame)


def fitted(picture: Image.Image, size: tuple[int, ...]) -> Image.Image:
    """Resize to fit into these pixels, with the same aspect ratio."""
    scale = min(size[0] / picture.width, size[1] / picture.height)
    across, down = (max(1, int(side * scale)) for side in picture.size)
    return picture.convert("RGB").resize((across, down), Image.Resampling.BICUBIC)


def kitty(file: bytes, frame: Frame) -> bytes:
    """Encode for kitty, in place of a picture of the same number; `q=2` suppresses answers, `C=1`
    keeps the cursor."""
    text = base64.b64encode(file)
    chunks = [text[i : i + KITTY_CHUNK] for i in range(0, len(text), KITTY_CHUNK)]
    keys = f"a=T,f=100,i={frame.number},p=1,c={frame.columns},r={frame.rows},C=1,q=2"
    return b"".join(
        b"\x1b_G%s,m=%d;%s" % (keys.encode() if at == 0 else b"q=2", at + 1 < len(chunks), chunk)
        + END
        for at, chunk in enumerate(chunks)
    )


def kitty_erased(number: int) -> bytes:
    """Return the bytes that erase a picture, also one that was cut off."""
    return b"\x1b_Gq=2,m=0;" + END + b"\x1b_Ga=d,d=I,i=%d,q=2" % number + END


def iterm(file: bytes, frame: Frame) -> bytes:
    arguments = f"size={len(file)};width={frame.columns};height={frame.rows};preserveAspectRatio=1"
    head = f"\x1b]1337;File=inline=1;{arguments};doNotMoveCursor=1:".encode()
    return head + base64.b64encode(file) + b"\x07"


def sixel(picture: Image.Image, colours: int = MAX_COLOURS) -> bytes:
    indexed = reduced(picture, colours)
    indices = np.asarray(indexed)
    return b"".join(
        (
            b'\x1bP0;1;0q"1;1;%d;%d' % picture.size,
            palette_of(indexed, int(indices.max()) + 1),
            RUNS.sub(run, b"-".join(bands(indices))),
            END,
        )
    )


def reduced(picture: Image.Image, colours: int) -> Image.Image:
    """Reduce the colours. Few colours need dithering; many do not, and compress better without."""
    colours = min(colours, MAX_COLOURS)
    indexed = picture.quantize(colours)
    if colours == MAX_COLOURS:
        return indexed
    return picture.quantize(palette=indexed, dither=Image.Dither.FLOYDSTEINBERG)


def palette_of(indexed: Image.Image, count: int) -> bytes:
    """Return the palette, in hundredths of full intensity."""
    values = np.asarray(indexed.getpalette("RGB"), np.float32)[: 3 * count].reshape(-1, 3)
    hundredths = (values * 100 / 255).round().astype(int).tolist()
    return b"".join(b"#%d;2;%d;%d;%d" % (i, *rgb) for i, rgb in enumerate(hundredths))


def bands(indices: NDArray[np.uint8]) -> Iterator[bytes]:
    """Yield bands of six rows of pixels: for each colour a character a column, a bit a row."""
    weights = (1 << np.arange(BAND)).astype(np.uint8)
    for top in range(0, len(indices), BAND):
        rows = indices[top : top + BAND]
        colours = np.unique(rows)
        is_set = rows[None] == colours[:, None, None]
        sixels = (is_set * weights[: len(rows), None]).sum(1, dtype=np.uint8) + BLANK
        lines = (row.tobytes().rstrip(b"?") for row in sixels)
        yield b"$".join(b"#%d%s" % each for each in zip(colours.tolist(), lines, strict=True))


def run(match: re.Match[bytes]) -> bytes:
    return b"!%d%s" % (len(match[0]), match[1])
