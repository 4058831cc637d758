"""What a quality's name stands for: the steps and the caches that the model itself needs.

A model's own are in `presets.json` beside its `model_index.json`, as `sdxl eval --sweep` or `sdxl
tune` measured them. It renders nothing.
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
"""Parameters that deep steps are chosen for, or that say others."""
STEPS = ("steps", "upscale_steps")
"""Parameters that say how far apart a picture's steps are."""
MEASURED = ("low", "medium", "high")
"""What a model may have its own of, the fastest first."""


@dataclass(frozen=True)
class Preset:
    """Deep steps are of a tuned plan: for these steps of this scheduler."""

    steps: int
    cache_interval: int
    scheduler: str | None = None
    deep_steps: tuple[int, ...] | None = None
    guidance_interval: tuple[float, float] | None = None

    def values(self) -> dict[str, Any]:
        """The parameters of a picture that it stands for."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def beside(
        self, given: Mapping[str, Any], *, is_named: bool = True, edit_strength: float | None = None
    ) -> dict[str, Any]:
        """The same where others are given: those go first, and deep steps that were chosen for
        another course than theirs are left out. So is the interval where others have few steps, and
        nobody named this preset. `edit_strength` is what an edit takes where others name none."""
        own = {"scheduler": GenerationParams.scheduler, "strength": 1.0, **self.values()}
        others = {name: value for name, value in given.items() if value is not None}
        course = {"strength": edit_strength, **others}
        said = {name: course[name] for name in COURSE if course.get(name) is not None}
        values = {**self.values(), **others}
        if "deep_steps" not in said and any(own.get(name) != v for name, v in said.items()):
            values.pop("deep_steps", None)
        if not is_named and "cache_interval" not in said and self._is_beside_few(others):
            values.pop("cache_interval")
        return values

    def _is_beside_few(self, others: Mapping[str, Any]) -> bool:
        steps = {others.get(name) or self.steps for name in STEPS} - {self.steps}
        return min(steps, default=FEW_STEPS) < FEW_STEPS

    def told(self) -> str:
        """In a few words, for people."""
        caches = f"interval {self.cache_interval}"
        if self.deep_steps is not None:
            caches = f"deep {','.join(map(str, self.deep_steps))}"
        name = f"{self.scheduler}, " if self.scheduler else ""
        guided = self.guidance_interval
        share = f", guided {guided[0]:g} to {guided[1]:g}" if guided else ""
        return f"{name}{self.steps} steps, {caches}{share}"


Presets = Mapping[str, Preset]
EXACT = {"xhigh": Preset(30, 1), "max": Preset(50, 1)}
"""The whole UNet in every step, whatever the model is: there is nothing to measure."""
UNMEASURED = {"low": Preset(20, 2), "medium": Preset(30, 2), "high": Preset(50, 2), **EXACT}
"""Of a model that has none of its own; docs/decisions.md says why these."""
QUALITIES = tuple(UNMEASURED)


class BrokenPresets(ValueError):
    """A presets.json that holds none: what it should hold."""


def load_presets(folder: Path, digest: Callable[[], str]) -> Presets:
    """`digest` is the model's, asked for where the file is of one model alone."""
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return UNMEASURED
    try:
        stored = json.loads(text)
        found, model = presets_of(stored["presets"]), stored.get("model_digest")
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
    return found


def preset_named(presets: Presets, name: str) -> Preset:
    """Raises InvalidParams for a name that is none."""
    if name not in presets:
        raise InvalidParams("quality", name, f"must be one of {', '.join(presets)}")
    return presets[name]


def presets_of(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Preset]:
    found = {name: _preset_of(values[name]) for name in MEASURED}
    return {**found, **EXACT}


def _preset_of(values: Mapping[str, Any]) -> Preset:
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    preset = Preset(**{**values, **lists})
    # The field table refuses what is out of bounds.
    whole = {"steps": preset.steps, "cache_interval": preset.cache_interval}
    GenerationParams(**{**preset.values(), **whole})
    return preset


def usual_interval(preset: Preset) -> str:
    """What is taken where nobody names a preset nor an interval, for people."""
    few = "" if preset.cache_interval == 1 else f", with fewer than {FEW_STEPS} steps 1"
    return f"{preset.cache_interval}{few}"


def told(presets: Presets) -> list[str]:
    return [f"{name} {preset.told()}" for name, preset in presets.items()]


def as_file(presets: Presets, measured: Mapping[str, Any], model_digest: str = "") -> bytes:
    """`measured`: what they were found on; with a digest they are refused for another model."""
    own = {name: presets[name].values() for name in MEASURED}
    model = {"model_digest": model_digest} if model_digest else {}
    return (json.dumps({"presets": own, **model, "measured": measured}, indent=1) + "\n").encode()
