"""Four kinds of request in flight together against each kind by itself, on the same engines.

sdxl bench mixed [--model mini] [--images 32] [--rounds 7] [--save mixed.json]

From text, from an image, under a mask, and an upscaled picture's second leg, all of one size and
as a service makes them unless told otherwise: 20, 16, 20 and 8 steps. Eight are in flight at a
time; as one leaves, the next comes, and in the mix the kinds take turns. Each round runs all four
kinds and the mix. Expected of the mix is the time that its requests take at their own kinds'
rates. Pictures of the mix are held against themselves alone. It times whole requests, from prompt
and image to the decoded picture, in one process: no HTTP, no files.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from engines import PRECISION
from eval.measuring.system_description import describe_system
from eval.measuring.timing import Run, Spread, take_turns
from eval.speed.agreement import psnr_db
from eval.speed.variants import PROMPTS
from sdxl.arguments import Parser, whole
from sdxl.files import write_json
from sdxl.params import GenerationParams, InvalidParams
from sdxl.source import SourceImage

if TYPE_CHECKING:
    from sdxl.pipeline import Edit, Pipeline, Result

    Asked = GenerationParams | Edit

AT_ONCE, ROWS = 8, 2
GOAL, GOAL_DB = 0.9, 60.0
MIX = "mixed"
UPSCALE = 2
Made = Callable[[GenerationParams], "Asked"]
"""a request of one kind, of one for a picture from text"""


@dataclass(frozen=True)
class MixedBench:
    """A model with room for so many images, and how many each variant makes."""

    pipeline: Pipeline
    steps: int
    images: int

    @property
    def side(self) -> int:
        return self.pipeline.sizes.default

    def requests(self) -> dict[str, list[Asked]]:
        """Eight of each kind, and of the mix two of each, which are among them."""
        texts = [
            GenerationParams(
                PROMPTS[i % len(PROMPTS)],
                steps=self.steps,
                seed=i,
                width=self.side,
                height=self.side,
            )
            for i in range(AT_ONCE)
        ]
        found = {name: [made(each) for each in texts] for name, made in kinds(self.side).items()}
        return found | {
            MIX: [each for pair in zip(*found.values(), strict=True) for each in pair][:AT_ONCE]
        }

    def paint(self, asked: Sequence[Asked]) -> list[Result]:
        """As many as this bench makes, in flow: the eight again and again."""
        results = self.pipeline.generate([*asked] * (self.images // AT_ONCE))
        if errors := [result.error for result in results if result.error]:
            raise errors[0]
        return results


def kinds(side: int) -> dict[str, Made]:
    return {
        "text": lambda params: params,
        "image": partial(edited, source_of(side)),
        "mask": partial(edited, source_of(side, has_mask=True)),
        "upscale": partial(upscaled, source_of(side // UPSCALE, side)),
    }


def edited(source: SourceImage, params: GenerationParams) -> Asked:
    from sdxl.pipeline import Edit

    return Edit(params.for_edit(has_mask=source.mask is not None), source)


def upscaled(source: SourceImage, params: GenerationParams) -> Asked:
    """The second leg alone, as the loop meets it: an image at the larger size."""
    assert params.width and params.height
    width, height = params.width // UPSCALE, params.height // UPSCALE
    return edited(source, replace(params, width=width, height=height, upscale=float(UPSCALE)))


def source_of(side: int, made: int | None = None, *, has_mask: bool = False) -> SourceImage:
    """A picture of this side, made anew in another one; a mask is over its middle."""
    shades = Image.linear_gradient("L").resize((side, side))
    turned = shades.transpose(Image.Transpose.ROTATE_90)
    picture = Image.merge("RGB", (shades, turned, Image.radial_gradient("L").resize((side, side))))
    mask = None
    if has_mask:
        mask = Image.new("L", (side, side), 0)
        mask.paste(255, (side // 4, side // 4, 3 * side // 4, 3 * side // 4))
    return SourceImage(picture, mask, (0, 0, side, side), (made or side, made or side))


def measure(bench: MixedBench, rounds: int) -> dict[str, Any]:
    requests = bench.requests()
    runs: dict[str, Run] = {name: partial(bench.paint, asked) for name, asked in requests.items()}
    seconds = take_turns(runs, rounds)
    return {
        "system": describe_system(),
        "model": bench.pipeline.model_id,
        "engines": dict(bench.pipeline.engines.description),
        "side": bench.side,
        "steps": bench.steps,
        "images": bench.images,
        "at_once": AT_ONCE,
        "seconds": seconds,
        **figures(seconds, bench.images),
        "least_db_of_itself_alone": least_db(bench, requests),
    }


def figures(seconds: Mapping[str, list[float]], images: int) -> dict[str, Any]:
    """Round by round. The mix has as many of each kind."""
    alone = zip(*(values for name, values in seconds.items() if name != MIX), strict=True)
    expected = [statistics.fmean(each) for each in alone]
    shares = [e / s for e, s in zip(expected, seconds[MIX], strict=True)]
    return {
        "images/s": {n: Spread.of([images / s for s in each]) for n, each in seconds.items()},
        "expected images/s": Spread.of([images / s for s in expected]),
        "mixed over expected": Spread.of(shares),
    }


def least_db(bench: MixedBench, requests: Mapping[str, Sequence[Asked]]) -> dict[str, float]:
    """By kind, of the mix's pictures beside the same ones made alone."""
    names = [name for name in requests if name != MIX]
    alone = [bench.pipeline.generate([each])[0] for each in requests[MIX]]
    found: dict[str, float] = {}
    for number, result in enumerate(bench.paint(requests[MIX])):
        name, itself = names[number % len(names)], alone[number % AT_ONCE]
        assert result.image is not None
        if itself.image is None:
            raise RuntimeError(f"{name}: no picture alone") from itself.error
        found[name] = min(found.get(name, float("inf")), psnr_db(result.image, itself.image))
    return found


def table(report: Mapping[str, Any]) -> str:
    head = "{model}, {side}×{side}, {at_once} in flight, {images} images a round"
    lines = [head.format(**report), "", f"{'':<10}images/s: median (least to most)"]
    lines += [f"{name:<10}{spread:.3f}" for name, spread in report["images/s"].items()]
    lines.append(f"{'expected':<10}{report['expected images/s']:.3f}")
    lines.append(f"\nmixed over expected {report['mixed over expected']:.3f}; the goal is {GOAL}")
    found = ", ".join(f"{name} {db:.1f}" for name, db in report["least_db_of_itself_alone"].items())
    lines.append(f"of itself alone, dB, the least: {found}; needed {GOAL_DB:.0f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    if options.images < AT_ONCE or options.images % AT_ONCE:
        raise InvalidParams("images", options.images, f"needed a multiple of {AT_ONCE}")

    import engines

    pipeline = engines.load(options.model, options.backend, precision=options.precision)
    bench = MixedBench(narrowed(pipeline), options.steps, options.images)
    report = measure(bench, options.rounds)
    if options.save:
        write_json(options.save, report, end="", default=asdict)
    print(table(report))
    return 0 if min(report["least_db_of_itself_alone"].values()) >= GOAL_DB else 1


def narrowed(pipeline: Pipeline) -> Pipeline:
    """With room for so many guided images and no more."""
    fitting = tuple(each for each in pipeline.engines.buckets if each <= AT_ONCE * ROWS)
    return replace(pipeline, engines=replace(pipeline.engines, buckets=fitting))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sdxl bench mixed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="mini")
    add("--backend", default="auto")
    add("--precision", help=PRECISION)
    add("--steps", type=whole, default=GenerationParams().steps)
    add(
        "--images",
        type=whole,
        default=4 * AT_ONCE,
        help="of each variant in each round (%(default)s)",
    )
    add("--rounds", type=whole, default=7)
    add("--save", type=Path, help="where to keep all figures, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
