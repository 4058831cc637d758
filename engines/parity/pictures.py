"""Paints pictures to compare two sets of engines, and scores them.

It does not know which engines are compared, nor the bounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdxl.checkpoint import MINI, Checkpoint, quiet_loading
from sdxl.engine import Engines
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

SEED = 2024
COMPARED, SCORED = 8, 64
PLAIN = (
    "a red bicycle leaning on a brick wall",
    "a portrait of an old sailor, oil on canvas",
    "a lighthouse at dusk, long exposure",
    "two cats on a blue sofa",
    "a bowl of lemons on a wooden table, window light",
    "a city street in the rain at night, neon signs",
    "a steam train crossing a stone viaduct in the mountains",
    "a close view of a bee on a sunflower",
)
LEAST_STEPS = 4
WORK = 3.7
"""the check's work for each step of a compared picture, in steps of the whole UNet: both sides
paint two plans, and one plan's calls are repeated"""
EIGHT_BIT_WORK = 1.2
"""work added for an 8-bit export: the served plan in PyTorch's 8 bits, and its calls"""

QUICK_SIDE = 512
"""Models of pictures up to this side are checked at their own size."""


@dataclass(frozen=True)
class Subject:
    """The pictures to paint. The embedded model's CLIP also scores the first `scored` prompts."""

    prompts: tuple[str, ...]
    compared: int
    scored: int = 0
    steps: int = 20
    side: int | None = None
    interval: int = 2
    """the served plan's interval"""
    budget_s: float = math.inf
    """A slow machine paints fewer pictures, at least one, and then fewer steps."""

    @property
    def painted(self) -> dict[str, int | None]:
        """The manifest's record of the painted pictures. A side of None is the model's own."""
        return {"pictures": self.compared, "steps": self.steps, "side": self.side}

    def fitted(self, step_s: float, work: float = WORK) -> Subject:
        """Reduce the subject to the budget, if a step of the whole UNet takes `step_s`."""
        affordable = self.budget_s / (work * step_s)
        if affordable >= self.compared * self.steps:
            return self
        pictures = max(1, int(affordable / self.steps))
        steps = min(self.steps, max(LEAST_STEPS, int(affordable)))
        return replace(self, compared=pictures, steps=steps)


def subject_of(checkpoint: Checkpoint, compared: int = COMPARED, scored: int = SCORED) -> Subject:
    """Return the pictures to paint: scenes for the embedded model, `PLAIN` for others. Models of
    large pictures paint at half their side, in a quarter of the time; a wrong graph or scale still
    shows."""
    if checkpoint.folder != MINI:
        side = checkpoint.sizes.default
        side = side if side <= QUICK_SIDE else max(checkpoint.sizes.minimum, side // 2)
        return Subject(PLAIN, min(compared, len(PLAIN)), side=side)
    import numpy as np

    from sdxl.mini.scenes import caption, sample_scene

    rng = np.random.default_rng(SEED)
    count = max(compared, scored)
    captions = tuple(caption(sample_scene(rng, held_out=True)) for _ in range(count))
    return Subject(captions, compared, scored)


def paint(
    checkpoint: Checkpoint,
    engines: Engines,
    subject: Subject,
    count: int,
    interval: int | None = None,
    first: int = 0,
) -> Tensor:
    """Paint pictures `first` to `count`; return [n, 3, height, width] in -1..1. `interval` replaces
    the subject's."""
    params = [
        GenerationParams(
            prompt,
            steps=subject.steps,
            cache_interval=interval or subject.interval,
            seed=i,
            width=subject.side,
            height=subject.side,
        )
        for i, prompt in enumerate(subject.prompts[:count])
        if i >= first
    ]
    images = []
    for result in Pipeline(checkpoint, engines).generate(params):
        if result.image is None:
            raise result.error or AssertionError("a result is an image or an error")
        images.append(result.image)
    return torch.stack(images)


def step_seconds(checkpoint: Checkpoint, engines: Engines, subject: Subject) -> float:
    """Return the time of a picture of one step, including decoding."""
    start = time.perf_counter()
    paint(checkpoint, engines, replace(subject, steps=1), 1)
    return time.perf_counter() - start


def clip_score(images: Tensor, prompts: Sequence[str]) -> float:
    """Return the mean of 100 × the cosine between each picture and its prompt, computed by the
    embedded model's scorer."""
    from sdxl.images import to_pixels
    from sdxl.mini.clip import Scorer

    with quiet_loading():
        scorer = Scorer()
    pictures = scorer.image_features(to_pixels(images))
    return float(100 * (pictures * scorer.text_features(list(prompts))).sum(-1).mean())
