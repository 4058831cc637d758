"""Runs the loop over calibration prompts for a few steps, so that the UNet gets real inputs.

The prompts are 500 in this package, or those of a file: a prompt on each line, or tab-separated
columns with one named `caption`, as MLPerf's tools write them, or ids of COCO's captions (MLPerf's
list), whose text is in an annotations file. It knows nothing of quantisation.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from onnx_export.export_spec import CalibrationSettings
from onnx_export.recipes import Recipe
from onnx_export.reference import torch_engines
from sdxl.checkpoint import MINI, Checkpoint
from sdxl.inflight import Failed, Request
from sdxl.params import GenerationParams, InvalidParams
from sdxl.pipeline import Pipeline
from sdxl.specs import Cut

ENCODERS = ("text_encoder", "text_encoder_2")
SEED = 0
OWN = Path(__file__).with_name("prompts.txt")
CAPTION = "caption"

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
        prompts = _read_prompts(file, annotations)
        return _spread(prompts, len(prompts) if count is None else count)
    count = recipe.prompts if count is None else count
    if checkpoint.folder != MINI:
        return _spread(_read_prompts(OWN), count)
    import numpy as np

    from sdxl.mini.scenes import caption, sample_scene

    rng = np.random.default_rng(SEED)
    return [caption(sample_scene(rng)) for _ in range(count)]


def _read_prompts(file: Path, annotations: Path | None = None) -> list[str]:
    lines = [line for line in map(str.strip, _text("calibration", file).splitlines()) if line]
    if not lines:
        raise InvalidParams("calibration", str(file), "must have a prompt on each line")
    if all(line.isdigit() for line in lines):
        return _captions(file, lines, annotations)
    if file.suffix == ".tsv":
        return _column(file, lines)
    return lines


def _spread(prompts: Sequence[str], count: int) -> list[str]:
    """Return `count` prompts spread over the list, since neighbours may be alike."""
    if not 1 <= count <= len(prompts):
        raise InvalidParams("calibration-count", count, f"must be 1 to {len(prompts)} prompts")
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _column(file: Path, lines: Sequence[str]) -> list[str]:
    rows = csv.DictReader(lines, delimiter="\t")
    if CAPTION not in (rows.fieldnames or ()):
        needed = f"must have a tab-separated column {CAPTION!r}"
        raise InvalidParams("calibration", str(file), needed)
    return [text for row in rows if (text := (row[CAPTION] or "").strip())]


def _captions(file: Path, ids: Sequence[str], annotations: Path | None) -> list[str]:
    if annotations is None:
        needed = "holds ids of COCO captions and needs --annotations captions_train2014.json"
        raise InvalidParams("calibration", str(file), needed)
    try:
        entries = json.loads(_text("annotations", annotations))["annotations"]
        texts = {str(entry["id"]): str(entry["caption"]).strip() for entry in entries}
    except (ValueError, LookupError, TypeError) as error:
        needed = f"must hold COCO's annotations of captions ({type(error).__name__}: {error})"
        raise InvalidParams("annotations", str(annotations), needed) from error
    if missing := [id_ for id_ in ids if id_ not in texts]:
        needed = f"must have the caption {missing[0]}, which {file.name} lists"
        raise InvalidParams("annotations", str(annotations), needed)
    return [texts[id_] for id_ in ids]


def _text(field: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParams(field, str(file), f"must hold UTF-8 text ({error})") from error


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
