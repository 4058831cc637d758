"""Measures the image adapter: `python -m training.mini.image_check` prints its figures.

Drawings of unseen scenes with one thing are the adapter's references; the prompt is empty. Does the
painted picture have the thing's colour, its shape, and the background's colour? Pictures are also
painted from the same noise without the adapter.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import PIL.Image

import engines
from sdxl.image_prompts import ImagePrompt
from sdxl.images import to_pixels
from sdxl.mini.scenes import SHAPES, Image, Scene, draw
from sdxl.params import GenerationParams
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline, WithPictures
from sdxl.places import IP_ADAPTERS
from training.mini.check import held_out_scenes
from training.mini.control_check import make_sheet
from training.mini.image_adapter import NAME
from training.mini.judge import blobs, fit_shape, outlines_of

FIRST_SEED = 20_000  # the first drawing's seed
_COLUMNS = 12
Verdicts = npt.NDArray[np.bool_]


def unseen_references(count: int) -> tuple[list[Scene], list[Image]]:
    """Return scenes of one thing that training never used, and a drawing of each."""
    scenes = [each for each in held_out_scenes(4 * count + 20) if each.kind == "single"][:count]
    return scenes, [draw(scene, FIRST_SEED + i) for i, scene in enumerate(scenes)]


def paint_prompted(pipeline: Pipeline, pictures: Sequence[Image], strength: float) -> list[Image]:
    """Paint one picture for each reference, from noise with the reference's number as seed."""
    requests = []
    for seed, picture in enumerate(pictures):
        prompts = (ImagePrompt(NAME, str(seed), strength),)
        params = GenerationParams("", seed=seed, cache_interval=1, image_prompts=prompts)
        reference = file_of(PIL.Image.fromarray(picture))
        requests.append(WithPictures(params, maps={str(seed): reference}))
    images = []
    for result in pipeline.generate(requests):
        assert result.image is not None, result.error
        images.append(to_pixels(result.image))
    return images


def verdict(image: Image, scene: Scene) -> tuple[bool, bool, bool]:
    """Return whether the thing's colour, its shape and the background's colour are right."""
    (thing,), (background, things) = scene.things, blobs(image)
    has_background = background == scene.background
    if len(things) != 1:
        return False, False, has_background
    ((colour, mask),) = outlines_of(image)
    shape = max(SHAPES, key=lambda name: fit_shape(colour, mask, name).overlap)
    return colour == thing.colour, shape == thing.shape, has_background


def verdicts(images: Sequence[Image], scenes: Sequence[Scene]) -> Verdicts:
    return np.array([verdict(*pair) for pair in zip(images, scenes, strict=True)])


def share_right(rights: Verdicts) -> float:
    """Return the share of pictures whose thing has the right colour and shape."""
    return float(rights[:, :2].all(1).mean())


def report(title: str, rights: Verdicts) -> None:
    both = share_right(rights)
    colour, shape, background = rights.mean(0)
    print(
        f"{title:18} n={len(rights):3}  colour and shape {both:.2f}: colour {colour:.2f}, shape "
        f"{shape:.2f}; background {background:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m training.mini.image_check"
    )
    parser.add_argument("--adapter", type=Path, default=IP_ADAPTERS, help="the adapter's folder")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--sheet", type=Path, help="write columns: reference, picture with it, without it (PNG)"
    )
    args = parser.parse_args()
    scenes, pictures = unseen_references(args.count)
    pipeline = engines.load(backend="torch", ip_adapters=str(args.adapter))
    with_it, without = (paint_prompted(pipeline, pictures, strength) for strength in (1.0, 0.0))
    for title, images in (("drawn", pictures), ("with it", with_it), ("without it", without)):
        report(title, verdicts(images, scenes))
    if args.sheet:
        make_sheet(list(zip(pictures, with_it, without, strict=True))[:_COLUMNS]).save(args.sheet)


if __name__ == "__main__":
    main()
