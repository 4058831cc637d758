"""The quality presets: steps and cache interval by name.

A model's own presets are in `presets.json` beside its `model_index.json`, written by `sdxl eval
--sweep` or `sdxl tune`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sdxl.checkpoint_checks import CheckpointError
from sdxl.parameter import FEW_STEPS
from sdxl.params import GenerationParams, InvalidParams

FILE = "presets.json"
COURSE = ("steps", "scheduler", "cache_interval", "deep_steps", "strength")
"""A preset's deep steps are valid only for the values of these parameters used in tuning."""
STEPS = ("steps", "upscale_steps")
"""The parameters that decide the distance between steps."""
MEASURED = ("low", "medium", "high")
"""The presets that a model's file can define, the fastest first."""


@dataclass(frozen=True)
class Preset:
    """The parameters of one quality."""

    steps: int
    cache_interval: int
    scheduler: str | None = None
    deep_steps: tuple[int, ...] | None = None
    guidance_interval: tuple[float, float] | None = None

    def values(self) -> dict[str, Any]:
        """Return the parameters that the preset sets."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def beside(
        self, given: Mapping[str, Any], *, is_named: bool = True, edit_strength: float | None = None
    ) -> dict[str, Any]:
        """Merge with the given parameters, which win. The preset's deep steps are dropped if a
        given parameter differs from those used in tuning. Its interval is dropped if few steps are
        given and the preset is only the default. `edit_strength`: an edit's default strength."""
        tuned = {"scheduler": GenerationParams.scheduler, "strength": 1.0, **self.values()}
        given = {name: value for name, value in given.items() if value is not None}
        course = {"strength": edit_strength, **given}
        course = {name: course[name] for name in COURSE if course.get(name) is not None}
        values = {**self.values(), **given}
        if "deep_steps" not in course and any(tuned.get(n) != v for n, v in course.items()):
            values.pop("deep_steps", None)
        steps = {given.get(name) or self.steps for name in STEPS} - {self.steps}
        has_few = min(steps, default=FEW_STEPS) < FEW_STEPS
        if not is_named and "cache_interval" not in course and has_few:
            values.pop("cache_interval")
        return values

    def describe(self) -> str:
        cache = f"interval {self.cache_interval}"
        if self.deep_steps is not None:
            cache = f"deep {','.join(map(str, self.deep_steps))}"
        scheduler = f"{self.scheduler}, " if self.scheduler else ""
        interval = self.guidance_interval
        guided = f", guided {interval[0]:g} to {interval[1]:g}" if interval else ""
        return f"{scheduler}{self.steps} steps, {cache}{guided}"


Presets = Mapping[str, Preset]
EXACT = {"xhigh": Preset(30, 1), "max": Preset(50, 1)}
"""Presets that run the whole UNet in every step, so they need no measurement."""
UNMEASURED = {"low": Preset(20, 2), "medium": Preset(30, 2), "high": Preset(50, 2), **EXACT}
"""The presets of a model without presets.json; docs/decisions.md has the reasons."""
QUALITIES = tuple(UNMEASURED)


def load_presets(folder: Path, digest: Callable[[], str]) -> Presets:
    """Read a model's presets. `digest` is called only if the file names a model. Raise
    CheckpointError for a file that is invalid or for another model."""
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return UNMEASURED
    try:
        stored = json.loads(text)
        presets, model = presets_of(stored["presets"]), stored.get("model_digest")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        needed = ", ".join(MEASURED)
        raise CheckpointError(
            f"{path}: needs steps and cache_interval, whole numbers above 0, of each of {needed}; "
            f"or remove it ({type(error).__name__}: {error})"
        ) from error
    if model is not None and model != digest():
        raise CheckpointError(
            f"{path}: measured on the model {str(model)[:12]}, expected {digest()[:12]}; run sdxl "
            "eval --sweep or sdxl tune with --store-presets on this one, or remove it"
        )
    return presets


def preset_named(presets: Presets, name: str) -> Preset:
    """Return a preset, or raise InvalidParams for an unknown name."""
    if name not in presets:
        raise InvalidParams.unknown("quality", name, presets)
    return presets[name]


def presets_of(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Preset]:
    measured = {name: _preset_of(values[name]) for name in MEASURED}
    return {**measured, **EXACT}


def _preset_of(values: Mapping[str, Any]) -> Preset:
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    preset = Preset(**{**values, **lists})
    # GenerationParams checks the bounds; a null must not become a default.
    whole = {"steps": preset.steps, "cache_interval": preset.cache_interval}
    GenerationParams(**{**preset.values(), **whole})
    return preset


def usual_interval(preset: Preset) -> str:
    """Describe the default interval, for the page's field."""
    few = "" if preset.cache_interval == 1 else f", with fewer than {FEW_STEPS} steps 1"
    return f"{preset.cache_interval}{few}"


def as_file(presets: Presets, measured: Mapping[str, Any], model_digest: str = "") -> bytes:
    """Return the content of presets.json. `measured` describes the measurement. With `model_digest`
    the file is refused for other models."""
    values = {name: presets[name].values() for name in MEASURED}
    model = {"model_digest": model_digest} if model_digest else {}
    return (
        json.dumps({"presets": values, **model, "measured": measured}, indent=1) + "\n"
    ).encode()
