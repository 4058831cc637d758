"""A reader of sixel data that interprets it like DEC's terminals, character by character.

From the VT3xx manual (EK-VT3XX-TP-001): `!` repeats, `$` goes back to the left, `-` to the next
band of six rows; a colour is chosen by `#n`, and set by `#n;2;red;green;blue` in hundredths.
"""

from __future__ import annotations

import re

from PIL import Image

TOKEN = re.compile(
    rb'"(?P<raster>[\d;]+)|#(?P<colour>[\d;]+)|!(?P<run>\d+)(?P<of>[?-~])|(?P<one>.)'
)


CUT_OFF = re.compile(rb'["#!][\d;]*$')


def decoded(data: bytes) -> Image.Image | None:
    """Decode the data between DCS and ST. Dots without a colour stay magenta. A truncated picture
    is decoded as far as possible if it states its size."""
    head, _, rest = data.partition(b"q")
    assert re.fullmatch(rb"[\d;]*", head), head
    rest = CUT_OFF.sub(b"", rest)
    dots: dict[tuple[int, int], tuple[int, int, int]] = {}
    palette: dict[int, tuple[int, int, int]] = {}
    size, chosen, x, band = None, 0, 0, 0
    for token in TOKEN.finditer(rest):
        if token["raster"]:
            _, _, *size = map(int, token["raster"].split(b";"))
        elif token["colour"]:
            chosen, *rgb = map(int, token["colour"].split(b";"))
            if rgb:
                assert rgb[0] == 2 and max(rgb[1:]) <= 100
                red, green, blue = (round(value * 255 / 100) for value in rgb[1:])
                palette[chosen] = red, green, blue
        elif token["one"] == b"$":
            x = 0
        elif token["one"] == b"-":
            x, band = 0, band + 1
        else:
            sixel = token["of"] or token["one"]
            bits = sixel[0] - 63
            assert 0 <= bits < 64, sixel
            run = range(x, x + int(token["run"] or 1))
            rows = [6 * band + row for row in range(6) if bits >> row & 1]
            dots.update({(column, row): palette[chosen] for column in run for row in rows})
            x = run.stop
    if size is None:
        return None
    assert all(x < size[0] and y < size[1] for x, y in dots)
    picture = Image.new("RGB", (size[0], size[1]), "magenta")
    for place, colour in dots.items():
        picture.putpixel(place, colour)
    return picture
