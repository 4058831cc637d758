"""Pictures in the formats of terminals, decoded by independent code."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from serve.render.terminal_pictures import Frame, draw_picture, fitted, frame_for
from tests.serve.terminals import Display

CELL = (10, 20)


def scene(width: int = 96, height: int = 64) -> Image.Image:
    """Return smooth colours, a flat part and a sharp edge."""
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    pixels = np.stack([across, down, 255 - across], -1).astype(np.uint8)
    pixels[: height // 2, : width // 3] = (250, 30, 20)
    return Image.fromarray(pixels)


def difference(found: Image.Image, expected: Image.Image) -> float:
    pair: list[NDArray[np.float32]] = [
        np.asarray(each.convert("RGB"), np.float32) for each in (found, expected)
    ]
    return float(np.abs(pair[0] - pair[1]).mean())


@pytest.mark.parametrize(
    ("size", "columns", "rows", "expected"),
    [
        ((128, 128), 79, 12, (24, 12)),
        ((1024, 512), 79, 12, (48, 12)),
        ((2048, 256), 79, 12, (79, 5)),
        ((256, 2048), 79, 12, (3, 12)),
        ((4096, 8), 79, 12, (79, 1)),
    ],
)
def test_a_frame_has_the_picture_s_shape_and_fits(
    size: tuple[int, int], columns: int, rows: int, expected: tuple[int, int]
) -> None:
    frame = frame_for(size, columns, rows, CELL)
    assert (frame.columns, frame.rows) == expected
    assert frame.columns <= columns and frame.rows <= rows


def test_unknown_cell_sizes_take_the_usual_one() -> None:
    assert frame_for((64, 64), 79, 12, (0, 0)) == frame_for((64, 64), 79, 12, CELL)


@pytest.mark.parametrize("protocol", ["kitty", "iterm"])
def test_a_picture_in_the_terminal_s_protocol_decodes_to_itself(protocol: str) -> None:
    frame = Frame(18, 6, CELL, number=4711)
    (drawn,) = Display().take(draw_picture(scene(), protocol, frame)).drawn
    assert (drawn.protocol, drawn.cells) == (protocol, (18, 6))
    assert drawn.number == (4711 if protocol == "kitty" else 0)
    assert difference(drawn.picture, fitted(scene(), frame.size)) == 0


def test_a_large_picture_is_sent_small_where_the_terminal_scales() -> None:
    frame = Frame(60, 30, (20, 40))
    (drawn,) = Display().take(draw_picture(scene(1024, 1024), "kitty", frame)).drawn
    assert (drawn.number, drawn.cells) == (1, (60, 30)) and max(drawn.picture.size) == 384


@pytest.mark.parametrize(("colours", "most"), [(256, 5.0), (16, 25.0), (2, 80.0)])
@pytest.mark.parametrize("size", [(18, 6), (7, 3), (1, 1)])
def test_few_colours_show_the_picture(colours: int, most: float, size: tuple[int, int]) -> None:
    frame = Frame(*size, CELL)
    (drawn,) = Display().take(draw_picture(scene(), "sixel", frame, colours)).drawn
    expected = fitted(scene(), frame.size)
    assert drawn.picture.size == expected.size
    assert len(drawn.picture.getcolors(65536) or ()) <= colours
    assert difference(drawn.picture, expected) < most


def test_sixels_show_one_colour_and_noise() -> None:
    frame = Frame(12, 6, CELL)
    flat = Image.new("RGB", frame.size, (51, 102, 204))
    data = draw_picture(flat, "sixel", frame)
    (drawn,) = Display().take(data).drawn
    assert difference(drawn.picture, flat) == 0 and len(data) < 200
    noise = np.random.default_rng(0).integers(0, 256, (*frame.size[::-1], 3), np.uint8)
    (drawn,) = Display().take(draw_picture(Image.fromarray(noise), "sixel", frame)).drawn
    assert difference(drawn.picture, Image.fromarray(noise)) < 25
