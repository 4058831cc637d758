"""Measures the image adapter: `python -m training.mini.image_check` prints its figures.

Unseen scenes of one thing are drawn and shown to the adapter; the prompt is empty. Does the painted
picture have the thing's colour, its shape, and the background's colour? The same noise is painted
without the adapter too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch

from sdxl.mini.scenes import SHAPES, Image, Scene, draw
from training.mini.check import GUIDANCE, STEPS, WEIGHTS, held_out_scenes, load_painter
from training.mini.control_check import make_sheet
from training.mini.image_adapter import NAME
from training.mini.judge import blobs, fit_shape, outlines_of

FIRST_SEED = 20_000  # of the drawn pictures
_COLUMNS = 12


def unseen_references(count: int) -> tuple[list[Scene], list[Image]]:
    """Return scenes of one thing that training never described, and a picture of each."""
    scenes = [each for each in held_out_scenes(4 * count + 20) if each.kind == "single"][:count]
    return scenes, [draw(scene, FIRST_SEED + i) for i, scene in enumerate(scenes)]


def load_adapted(folder: Path, weights: Path = WEIGHTS) -> Any:
    """Load the model and the adapter in plain diffusers."""
    pipe = load_painter(weights)
    pipe.load_ip_adapter(str(folder), subfolder="", weight_name=f"{NAME}.safetensors")
    return pipe


def paint_prompted(pipe: Any, pictures: Sequence[Image], strength: float = 1.0) -> list[Image]:
    """Paint one picture a reference, each from its own seeded noise. diffusers would show all
    references of a call to each of its rows."""
    pipe.set_ip_adapter_scale(strength)
    images: list[Image] = []
    for seed, picture in enumerate(pictures):
        (found,) = pipe(
            "",
            ip_adapter_image=PIL.Image.fromarray(picture),
            generator=torch.Generator().manual_seed(seed),
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            output_type="np",
        ).images
        images.append((found * 255 + 0.5).astype(np.uint8))
    return images


def verdict(image: Image, scene: Scene) -> tuple[bool, bool, bool]:
    """Return whether the thing's colour, its shape and the background's colour are right."""
    (thing,), (background, things) = scene.things, blobs(image)
    same_ground = background == scene.background
    if len(things) != 1:
        return False, False, same_ground
    ((colour, mask),) = outlines_of(image)
    shape = max(SHAPES, key=lambda name: fit_shape(colour, mask, name).overlap)
    return colour == thing.colour, shape == thing.shape, same_ground


def report(title: str, images: Sequence[Image], scenes: Sequence[Scene]) -> None:
    rights = np.array([verdict(*pair) for pair in zip(images, scenes, strict=True)])
    both = float(rights[:, :2].all(1).mean())
    colour, shape, ground = rights.mean(0)
    print(
        f"{title:18} n={len(rights):3}  colour and shape {both:.2f}: colour {colour:.2f}, shape "
        f"{shape:.2f}; background {ground:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m training.mini.image_check"
    )
    parser.add_argument("--adapter", type=Path, required=True, help="its folder")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--sheet", type=Path, help="write reference, with, without below each other (PNG)"
    )
    args = parser.parse_args()
    scenes, pictures = unseen_references(args.count)
    pipe = load_adapted(args.adapter)
    with_it, without = (paint_prompted(pipe, pictures, strength) for strength in (1.0, 0.0))
    for title, images in (("drawn", pictures), ("with it", with_it), ("without it", without)):
        report(title, images, scenes)
    if args.sheet:
        make_sheet(list(zip(pictures, with_it, without, strict=True))[:_COLUMNS]).save(args.sheet)


if __name__ == "__main__":
    main()
