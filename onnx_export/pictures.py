"""Pictures painted to compare two sets of engines, and two figures for how alike they are.

It does not know what the engines are, nor which figure is good enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdxl.checkpoint import MINI, Checkpoint, quiet_loading
from sdxl.engine import Engines
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

SEED = 2024
COMPARED, SCORED = 8, 64
PLAIN = ("a red bicycle leaning on a brick wall", "a portrait of an old sailor, oil on canvas")


@dataclass(frozen=True)
class Subject:
    """What is painted. `scored`: so many of the prompts are also held against the mini's CLIP."""

    prompts: tuple[str, ...]
    compared: int
    scored: int = 0
    steps: int = 20
    side: int | None = None


def subject_of(checkpoint: Checkpoint, compared: int = COMPARED, scored: int = SCORED) -> Subject:
    """Scenes for the embedded model. Any other is painted small, in a few steps: that takes
    minutes on a CPU, and shows a wrong graph as well."""
    if checkpoint.folder != MINI:
        return Subject(PLAIN, len(PLAIN), steps=4, side=checkpoint.sizes.minimum)
    import numpy as np

    from sdxl.mini.scenes import caption, sample_scene

    rng = np.random.default_rng(SEED)
    count = max(compared, scored)
    captions = tuple(caption(sample_scene(rng, held_out=True)) for _ in range(count))
    return Subject(captions, compared, scored)


def paint(checkpoint: Checkpoint, engines: Engines, subject: Subject, count: int) -> Tensor:
    """[count, 3, height, width] in -1..1."""
    params = [
        GenerationParams(
            prompt, steps=subject.steps, seed=i, width=subject.side, height=subject.side
        )
        for i, prompt in enumerate(subject.prompts[:count])
    ]
    images = []
    for result in Pipeline(checkpoint, engines).generate(params):
        if result.image is None:
            raise result.error or AssertionError("a result is an image or an error")
        images.append(result.image)
    return torch.stack(images)


def psnr(found: Tensor, expected: Tensor) -> float:
    """Over all pixels of all pictures together, in dB; at most 120."""
    error = float(((found - expected) / 2).double().square().mean())
    return float(-10 * torch.tensor(error, dtype=torch.float64).clamp(min=1e-12).log10())


def clip_score(images: Tensor, prompts: Sequence[str]) -> float:
    """The mean of 100 × the cosine between each picture and its prompt, by the mini's scorer."""
    from sdxl.images import to_pixels
    from sdxl.mini.clip import Scorer

    with quiet_loading():
        scorer = Scorer()
    pictures = scorer.image_features(to_pixels(images))
    return float(100 * (pictures * scorer.text_features(list(prompts))).sum(-1).mean())
