"""Measures the ControlNets: `python -m training.mini.control_check` prints their figures.

Unseen layouts are painted with and without their map, from the same noise and the same caption,
which states no sizes, places or relations. The figure is an IoU: for `edges`, of the map and
Canny's edges of the picture, both widened by one pixel on each side; for `depth`, of the things in
the map and in the picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline
from scipy.ndimage import binary_dilation

from sdxl.canny import EIGHT_NEIGHBOURS, Pixels, canny
from sdxl.mini.scenes import Image, caption
from sdxl.places import CONTROLNETS
from training.mini.check import GUIDANCE, STEPS, held_out_scenes, load_painter, paint_with
from training.mini.judge import Mask, mask_things
from training.mini.layouts import (
    DEPTH,
    EDGES,
    FARTHEST,
    HIGH,
    LOW,
    MAPS,
    SettledScene,
    settle_layout,
    without_layout,
)

FIRST_SEED = 10_000  # the first layout's seed; training uses random seeds
_COLUMNS = 12


def unseen_layouts(count: int) -> list[SettledScene]:
    return [settle_layout(scene, FIRST_SEED + i) for i, scene in enumerate(held_out_scenes(count))]


def load_controlled(folder: Path) -> Any:
    """Load the model and a ControlNet in plain diffusers."""
    net = ControlNetModel.from_pretrained(folder, torch_dtype=torch.float32)
    parts = load_painter().components
    pipe = StableDiffusionXLControlNetPipeline(**parts, controlnet=net, add_watermarker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def compare_edges(image: Image, edges: Pixels) -> float:
    painted, wanted = (
        binary_dilation(each > 0, EIGHT_NEIGHBOURS) for each in (canny(image, LOW, HIGH), edges)
    )
    return _overlap(painted, wanted)


def compare_things(image: Image, depth: Pixels) -> float:
    return _overlap(mask_things(image), depth >= FARTHEST / 2)


def _overlap(first: Mask, second: Mask) -> float:
    return float((first & second).sum() / max((first | second).sum(), 1))


COMPARE: dict[str, Callable[[Image, Pixels], float]] = {EDGES: compare_edges, DEPTH: compare_things}


def measure(name: str, images: Sequence[Image], maps: Sequence[Pixels]) -> list[float]:
    """Return the IoU of each picture and its map."""
    return [COMPARE[name](image, each) for image, each in zip(images, maps, strict=True)]


def report(title: str, overlaps: list[float]) -> None:
    mean, low = np.mean(overlaps), np.percentile(overlaps, 10)
    print(f"{title:24} n={len(overlaps):3}  IoU {mean:.3f}, a tenth below {low:.3f}", flush=True)


def make_sheet(columns: Sequence[Sequence[Pixels]]) -> PIL.Image.Image:
    """Return a picture of columns, each with a map and its pictures from top to bottom."""
    cells = [
        [np.asarray(PIL.Image.fromarray(each).convert("RGB")) for each in column]
        for column in columns
    ]
    return PIL.Image.fromarray(np.concatenate([np.concatenate(column) for column in cells], 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m training.mini.control_check"
    )
    parser.add_argument("names", nargs="*", default=list(MAPS), help=f"of {', '.join(MAPS)}")
    parser.add_argument("--nets", type=Path, default=CONTROLNETS, help="folder of the ControlNets")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--strength", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument(
        "--sheet", type=Path, help="write columns: map, picture with it, without it (PNG)"
    )
    args = parser.parse_args()
    layouts = unseen_layouts(args.count)
    texts = [caption(without_layout(layout.scene)) for layout in layouts]
    rows: list[PIL.Image.Image] = []
    for name in args.names:
        maps = [MAPS[name](layout) for layout in layouts]
        pipe = load_controlled(args.nets / name)
        with_net, without = (
            paint_with(
                pipe,
                texts,
                args.guidance,
                args.steps,
                maps=maps,
                controlnet_conditioning_scale=strength,
            )
            for strength in (args.strength, 0.0)
        )
        report(f"{name}, drawn", measure(name, [layout.draw() for layout in layouts], maps))
        report(f"{name}, with it", measure(name, with_net, maps))
        report(f"{name}, without it", measure(name, without, maps))
        rows.append(make_sheet(list(zip(maps, with_net, without, strict=True))[:_COLUMNS]))
    if args.sheet:
        PIL.Image.fromarray(np.concatenate([np.asarray(row) for row in rows])).save(args.sheet)


if __name__ == "__main__":
    main()
