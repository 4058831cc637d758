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

from sdxl.parameter import FEW_STEPS
from sdxl.params import GenerationParams, InvalidParams

FILE = "presets.json"
COURSE = ("steps", "scheduler", "cache_interval", "deep_steps", "strength")
"""Deep steps are valid only for the values of these parameters that they were tuned with."""
STEPS = ("steps", "upscale_steps")
"""The parameters that set how far apart steps are."""
MEASURED = ("low", "medium", "high")
"""The presets that a model can define, the fastest first."""


@dataclass(frozen=True)
class Preset:
    """One preset. Its deep steps, if any, belong to its steps and scheduler."""

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
        """Merge with given parameters, which win. Deep steps are dropped if a given parameter
        differs from those they were tuned with. The interval is dropped if few steps are given and
        the preset is only the default. `edit_strength` is the default strength of an edit."""
        own = {"scheduler": GenerationParams.scheduler, "strength": 1.0, **self.values()}
        others = {name: value for name, value in given.items() if value is not None}
        course = {"strength": edit_strength, **others}
        course_given = {name: course[name] for name in COURSE if course.get(name) is not None}
        values = {**self.values(), **others}
        if "deep_steps" not in course_given and any(
            own.get(name) != v for name, v in course_given.items()
        ):
            values.pop("deep_steps", None)
        if not is_named and "cache_interval" not in course_given and self._is_beside_few(others):
            values.pop("cache_interval")
        return values

    def _is_beside_few(self, others: Mapping[str, Any]) -> bool:
        steps = {others.get(name) or self.steps for name in STEPS} - {self.steps}
        return min(steps, default=FEW_STEPS) < FEW_STEPS

    def describe(self) -> str:
        """Describe the preset in a few words."""
        caches = f"interval {self.cache_interval}"
        if self.deep_steps is not None:
            caches = f"deep {','.join(map(str, self.deep_steps))}"
        name = f"{self.scheduler}, " if self.scheduler else ""
        guided = self.guidance_interval
        share = f", guided {guided[0]:g} to {guided[1]:g}" if guided else ""
        return f"{name}{self.steps} steps, {caches}{share}"


Presets = Mapping[str, Preset]
EXACT = {"xhigh": Preset(30, 1), "max": Preset(50, 1)}
"""These run the whole UNet in every step, so they need no measurement."""
UNMEASURED = {"low": Preset(20, 2), "medium": Preset(30, 2), "high": Preset(50, 2), **EXACT}
"""The presets of a model without presets.json; docs/decisions.md says why these."""
QUALITIES = tuple(UNMEASURED)


class BrokenPresets(ValueError):
    """A presets.json without valid presets."""


def load_presets(folder: Path, digest: Callable[[], str]) -> Presets:
    """Read a model's presets. `digest` is called only if the file names a model."""
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
        raise BrokenPresets(
            f"{path}: needs steps and cache_interval, whole numbers above 0, of each of {needed}; "
            f"or remove it ({type(error).__name__}: {error})"
        ) from error
    if model is not None and model != digest():
        raise BrokenPresets(
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
    # The field table refuses what is out of bounds.
    whole = {"steps": preset.steps, "cache_interval": preset.cache_interval}
    GenerationParams(**{**preset.values(), **whole})
    return preset


def usual_interval(preset: Preset) -> str:
    """Describe the default interval."""
    few = "" if preset.cache_interval == 1 else f", with fewer than {FEW_STEPS} steps 1"
    return f"{preset.cache_interval}{few}"


def describe_presets(presets: Presets) -> list[str]:
    return [f"{name} {preset.describe()}" for name, preset in presets.items()]


def as_file(presets: Presets, measured: Mapping[str, Any], model_digest: str = "") -> bytes:
    """Return the content of presets.json. `measured` describes the measurement; with `model_digest`
    other models refuse the file."""
    own = {name: presets[name].values() for name in MEASURED}
    model = {"model_digest": model_digest} if model_digest else {}
    return (json.dumps({"presets": own, **model, "measured": measured}, indent=1) + "\n").encode()
