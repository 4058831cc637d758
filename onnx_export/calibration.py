"""Runs the loop over calibration prompts for a few steps, so that the UNet gets real inputs.

It knows nothing of quantisation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from onnx_export.export_spec import CalibrationSettings
from onnx_export.prompts import OWN, read_prompts, spread
from onnx_export.recipes import Recipe
from onnx_export.reference import torch_engines
from sdxl.checkpoint import MINI, Checkpoint
from sdxl.inflight import Failed, Request
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from sdxl.specs import Cut

ENCODERS = ("text_encoder", "text_encoder_2")
SEED = 0

OnProgress = Callable[[int, int], None]
"""called with the number of finished prompts and of all prompts"""


def encoders_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the parts that a calibration runs besides the UNet; for inpainting also the VAE."""
    return (*ENCODERS, "vae") if checkpoint.arch.masked_channels else ENCODERS


@dataclass
class StepClock:
    """The current step, for calibrators with a statistic by steps."""

    step: int = 0


def calibration_prompts(
    checkpoint: Checkpoint,
    file: Path | None,
    recipe: Recipe,
    count: int | None = None,
    annotations: Path | None = None,
) -> list[str]:
    """Return the file's prompts; without a file the package's, or scenes for the embedded model."""
    if file is not None:
        prompts = read_prompts(file, annotations)
        return spread(prompts, len(prompts) if count is None else count)
    count = recipe.prompts if count is None else count
    if checkpoint.folder != MINI:
        return spread(read_prompts(OWN), count)
    import numpy as np

    from sdxl.mini.scenes import caption, sample_scene

    rng = np.random.default_rng(SEED)
    return [caption(sample_scene(rng)) for _ in range(count)]


def first_steps(
    checkpoint: Checkpoint,
    parts: dict[str, nn.Module],
    prompts: Sequence[str],
    recipe: Recipe,
    settings: CalibrationSettings,
    clock: StepClock,
    cut: Cut = "reference",
    on_progress: OnProgress = lambda done, count: None,
) -> None:
    """Run the first steps of every prompt's image with the served plan, so that layers of Shallow
    also read cached features."""
    pipeline = Pipeline(checkpoint, torch_engines(checkpoint, parts, cut))
    params = [
        pipeline.resolve(
            GenerationParams(
                text,
                negative_prompt=settings.negative_prompt,
                guidance=settings.guidance,
                steps=recipe.steps,
                cache_interval=settings.cache_interval,
                width=settings.side,
                height=settings.side,
                seed=i,
            )
        )
        for i, text in enumerate(prompts)
    ]
    done = 0
    for batch in _batches(pipeline, params, recipe.batch):
        loop = pipeline.in_flight()
        for request in batch:
            loop.submit(request)
        for clock.step in range(recipe.calibrated_steps):
            for event in loop.tick():
                if isinstance(event, Failed):
                    raise event.cause
        done += len(batch)
        on_progress(done, len(params))


def _batches(
    pipeline: Pipeline, all_params: Sequence[GenerationParams], size: int
) -> Iterator[list[Request]]:
    """Yield batches of prompts of equal length, so that a step is one call of the UNet."""
    by_length = defaultdict[int, list[Request]](list)
    for params in all_params:
        (conditioning,) = pipeline.encode([params])
        request = pipeline.request(params, conditioning)
        by_length[conditioning.tokens].append(request)
    for requests in by_length.values():
        yield from (requests[i : i + size] for i in range(0, len(requests), size))
