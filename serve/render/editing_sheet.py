"""The picture in docs/editing.md: `python -m serve.render.editing_sheet FILE`.

What the embedded model makes of an edit: strengths, a mask and what fills it, a larger canvas.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

import engines
from sdxl.files import write_atomic
from sdxl.images import Pixels, pasted, to_pixels
from sdxl.params import GenerationParams
from sdxl.picture_files import file_of
from sdxl.pipeline import Edit, Pipeline
from sdxl.source import GivenImage
from serve.render.contact_sheet import contact_sheet

SIDE = 128
SEED = 7
FIRST = "a large red circle above a small green square on a blue background"
OTHER = "a large yellow star on a blue background"
FILLINGS = ("a large yellow star", "a large white ring")
BELOW = " above a small green square on a blue background"
STRENGTHS = (0.3, 0.6, 0.9)
MASKED = (0, 0, SIDE, 72)
WIDER = (SIDE + 64, SIDE)


def main() -> None:
    pipeline = engines.load("mini")
    first = made(pipeline, GenerationParams(FIRST, seed=SEED))
    shown = [(first, "from text")]
    for strength in STRENGTHS:
        asked = GenerationParams(OTHER, seed=SEED, strength=strength)
        shown.append((made(pipeline, asked, Image.fromarray(first)), f"strength {strength}"))
    mask = Image.new("L", (SIDE, SIDE), 0)
    mask.paste(255, MASKED)
    shown.append((np.array(mask.convert("RGB")), "mask"))
    for filling in FILLINGS:
        asked = GenerationParams(filling + BELOW, seed=SEED)
        shown.append((made(pipeline, asked, Image.fromarray(first), mask), filling))
    canvas = Image.new("RGBA", WIDER)
    canvas.paste(Image.fromarray(first), (0, 0))
    wider = GenerationParams(FIRST, seed=SEED, width=WIDER[0], height=WIDER[1])
    shown.append((made(pipeline, wider, canvas), "a larger canvas"))
    write_atomic(Path(sys.argv[1]), file_of(Image.fromarray(contact_sheet(shown))))


def made(
    pipeline: Pipeline,
    asked: GenerationParams,
    picture: Image.Image | None = None,
    mask: Image.Image | None = None,
) -> Pixels:
    if picture is None:
        (result,) = pipeline.generate([asked])
    else:
        given = GivenImage.read(file_of(picture), None if mask is None else file_of(mask))
        params = given.sized(asked, pipeline.sizes)
        (result,) = pipeline.generate([Edit(params, given.source(params))])
    if result.image is None:
        raise result.error or AssertionError("a result is an image or an error")
    pixels = to_pixels(result.image)
    return pixels if result.source is None else pasted(pixels, result.source)


if __name__ == "__main__":
    main()
