"""What the UNet sees while it paints: our own loop, run over calibration prompts for a few steps.

It knows nothing of quantisation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from onnx_export.recipes import Recipe
from onnx_export.reference import torch_engines
from sdxl.checkpoint import MINI, Checkpoint
from sdxl.inflight import Failed, Request
from sdxl.params import GenerationParams, InvalidParams
from sdxl.pipeline import Pipeline

ENCODERS = ("text_encoder", "text_encoder_2")
SEED = 0


def calibration_prompts(checkpoint: Checkpoint, file: Path | None, recipe: Recipe) -> list[str]:
    """The file's lines, or scenes that the embedded model knows."""
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidParams("calibration", str(file), f"needed UTF-8 text ({error})") from error
        prompts = [line for line in map(str.strip, lines) if line]
        if not prompts:
            raise InvalidParams("calibration", str(file), "needed a prompt on each line")
        return prompts
    if checkpoint.folder != MINI:
        raise InvalidParams(
            "calibration",
            None,
            f"needed a file of about {recipe.prompts} prompts, one a line, "
            f"to quantise {checkpoint.name}",
        )
    import numpy as np

    from sdxl.mini.scenes import caption, sample_scene

    rng = np.random.default_rng(SEED)
    return [caption(sample_scene(rng)) for _ in range(recipe.prompts)]


def first_steps(
    checkpoint: Checkpoint, parts: dict[str, nn.Module], prompts: Sequence[str], recipe: Recipe
) -> None:
    """Run the first steps of every prompt's image, each of them through the whole UNet: the
    modules that Deep and Shallow share then see all of these steps, whatever plan they serve."""
    pipeline = Pipeline(checkpoint, torch_engines(checkpoint, parts))
    asked = [
        pipeline.resolve(GenerationParams(text, steps=recipe.steps, cache_interval=1, seed=i))
        for i, text in enumerate(prompts)
    ]
    for batch in _batches(pipeline, asked, recipe.batch):
        loop = pipeline.in_flight()
        for request in batch:
            loop.submit(request)
        for _ in range(recipe.calibrated_steps):
            for event in loop.tick():
                if isinstance(event, Failed):
                    raise event.cause


def _batches(
    pipeline: Pipeline, asked: Sequence[GenerationParams], size: int
) -> Iterator[list[Request]]:
    """Of prompts of one length each, so that a step of theirs is one call of the UNet."""
    by_length = defaultdict[int, list[Request]](list)
    for params in asked:
        (conditioning,) = pipeline.encode([params])
        request = pipeline.request(params, conditioning)
        by_length[conditioning.tokens].append(request)
    for requests in by_length.values():
        yield from (requests[i : i + size] for i in range(0, len(requests), size))
