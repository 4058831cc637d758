"""`sdxl eval watermark`: how often the watermark is detected in marked pictures after JPEG, scaling
and crops, and in unmarked ones.

Four families of pictures: a model's from a folder, drawn scenes, plain colours, and noise of 1024
pixels a side with a flat or falling spectrum.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from eval.measuring.options import add_option
from eval.measuring.psnr import psnr_db
from sdxl.arguments import Parser
from sdxl.files import write_json
from sdxl.mini.scenes import draw, sample_scene
from sdxl.params import InvalidParams
from sdxl.watermark import FOUND, Pixels, find, mark

MODEL, SCENES, PLAIN, NOISE = FAMILIES = ("model", "scenes", "plain", "noise")
COUNTS = {MODEL: (300, 500), SCENES: (100, 1400), PLAIN: (80, 80), NOISE: (20, 20)}
"""marked and unmarked pictures of each family: 500 and 2000 in all"""
SIDES = (128, 192, 256)
LARGE = 1024
SLOPES = (0.0, 0.5, 1.0)
"""exponents by which noise falls with frequency; photographs are near 1"""
CONTRAST = 45
JPEG_QUALITY = 75


@dataclass
class Marked:
    count: int = 0
    least_psnr_db: float = math.inf
    mark_s: float = 0.0
    """CPU time a picture"""
    png_s: float = 0.0
    found: dict[str, int] = field(default_factory=dict)
    least_score: dict[str, float] = field(default_factory=dict)


@dataclass
class Unmarked:
    count: int = 0
    taken_for_marked: int = 0
    highest_score: float = 0.0


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    if options.family == MODEL and not options.images:
        raise InvalidParams("images", "", "must be a folder if the model is of the family")
    out = Path(options.out)
    report = json.loads(out.read_text()) if out.exists() else {}
    marked, unmarked = (min(most, options.most) for most in COUNTS[options.family])
    folder = Path(options.images or ".")
    report[options.family] = {
        "marked": asdict(measure_marked(islice(make_pictures(options.family, folder), marked))),
        "unmarked": asdict(
            measure_unmarked(islice(make_pictures(options.family, folder), unmarked))
        ),
    }
    write_json(out, report)
    print(describe(report))
    return 0


def build_parser() -> Parser:
    description = "How often the watermark is found in marked and in unmarked pictures."
    parser = Parser(prog="sdxl eval watermark", description=description)
    add = partial(add_option, parser)
    add("--family", None, "the family of pictures", required=True, choices=FAMILIES)
    add("--images", None, "PNG files without a watermark, for the family model", "DIR")
    add("--most", 2000, "the most pictures")
    add("--out", None, "JSON report; the other families in it are kept", "FILE", required=True)
    return parser


def make_pictures(family: str, folder: Path) -> Iterator[Pixels]:
    """The pictures of a family, the same in every run."""
    if family == MODEL:
        for path in sorted(folder.glob("*.png")):
            with Image.open(path) as image:
                yield np.asarray(image.convert("RGB"))
        return
    for seed in count():
        rng = np.random.default_rng(seed)
        if family == SCENES:
            yield np.asarray(draw(sample_scene(rng), seed))
        else:
            yield _plain(rng, seed) if family == PLAIN else _noise(rng, seed)


def _plain(rng: np.random.Generator, seed: int) -> Pixels:
    """Every second picture has only values of 0 and 255, which a mark can move one way."""
    side = SIDES[seed % len(SIDES)]
    colour = 255 * rng.integers(0, 2, 3) if seed % 2 else rng.integers(0, 256, 3)
    return np.full((side, side, 3), colour, np.uint8)


def _noise(rng: np.random.Generator, seed: int) -> Pixels:
    side = LARGE
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = 1
    falling = frequency ** -SLOPES[seed % len(SLOPES)]
    falling[0, 0] = 0
    layers = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((4, side, side))) * falling)
    # The colours share most of their noise, as in photographs.
    picture = np.moveaxis(layers[0] + 0.3 * layers[1:], 0, -1)
    return np.clip(128 + CONTRAST * picture / picture.std(), 0, 255).astype(np.uint8)


def change_picture(pixels: Pixels, rng: np.random.Generator) -> Iterator[tuple[str, Pixels]]:
    yield "none", pixels
    file, picture = io.BytesIO(), Image.fromarray(pixels)
    picture.save(file, "JPEG", quality=JPEG_QUALITY)
    yield f"jpeg_{JPEG_QUALITY}", np.asarray(Image.open(file).convert("RGB"))
    half = round(picture.width / 2), round(picture.height / 2)
    yield "half_the_size", np.asarray(picture.resize(half, Image.Resampling.LANCZOS))
    yield "crop_leaves_a_quarter", crop(pixels, 0.25, rng)
    yield "crop_takes_a_quarter", crop(pixels, 0.75, rng)


def crop(pixels: Pixels, share: float, rng: np.random.Generator) -> Pixels:
    """Cut out this share of the area, at a random place."""
    height, width = (round(side * math.sqrt(share)) for side in pixels.shape[:2])
    top = int(rng.integers(pixels.shape[0] - height + 1))
    left = int(rng.integers(pixels.shape[1] - width + 1))
    return pixels[top : top + height, left : left + width]


def measure_marked(originals: Iterator[Pixels]) -> Marked:
    result, rng = Marked(), np.random.default_rng(0)
    for original in originals:
        began_s = time.process_time()
        pixels = mark(original)
        marked_s = time.process_time()
        Image.fromarray(pixels).save(io.BytesIO(), "PNG")
        result.count += 1
        result.mark_s += (marked_s - began_s - result.mark_s) / result.count
        result.png_s += (time.process_time() - marked_s - result.png_s) / result.count
        result.least_psnr_db = min(result.least_psnr_db, psnr_db(original, pixels))
        for name, altered in change_picture(pixels, rng):
            finding = find(altered)
            result.found[name] = result.found.get(name, 0) + finding.is_found
            least = result.least_score.get(name, math.inf)
            result.least_score[name] = min(least, finding.score)
    return result


def measure_unmarked(originals: Iterator[Pixels]) -> Unmarked:
    result = Unmarked()
    for original in originals:
        finding = find(original)
        result.count += 1
        result.taken_for_marked += finding.is_found
        result.highest_score = max(result.highest_score, finding.score)
    return result


def describe(report: Mapping[str, Any]) -> str:
    lines = [f"a watermark is detected at a score of {FOUND} or more"]
    for family, results in report.items():
        marked, unmarked = Marked(**results["marked"]), Unmarked(**results["unmarked"])
        lines.append(
            f"{family}: {marked.count} marked, at least {marked.least_psnr_db:.1f} dB; "
            f"{unmarked.taken_for_marked} of {unmarked.count} unmarked ones detected "
            f"(score up to {unmarked.highest_score:.1f}); marking takes "
            f"{1000 * marked.mark_s:.1f} ms, the PNG {1000 * marked.png_s:.1f}"
        )
        lines += [
            f"  {name:<22} found in {count}, score from {marked.least_score[name]:.1f}"
            for name, count in marked.found.items()
        ]
    return "\n".join(lines)
