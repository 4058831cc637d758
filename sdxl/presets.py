"""What a quality's name stands for: the steps and the cache interval that the model itself needs.

A model's own are in `presets.json` beside its `model_index.json`, as `sdxl eval --sweep` measured
them. It renders nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sdxl.params import InvalidParams

FILE = "presets.json"
MEASURED = ("low", "medium", "high")
"""What a model may have its own of, the fastest first."""


@dataclass(frozen=True)
class Preset:
    steps: int
    cache_interval: int


Presets = Mapping[str, Preset]
EXACT = {"xhigh": Preset(30, 1), "max": Preset(50, 1)}
"""The whole UNet in every step, whatever the model is: there is nothing to measure."""
UNMEASURED = {"low": Preset(20, 2), "medium": Preset(30, 2), "high": Preset(50, 2), **EXACT}
"""Of a model that has none of its own; docs/decisions.md says why these."""
QUALITIES = tuple(UNMEASURED)


class BrokenPresets(ValueError):
    """A presets.json that holds none: what it should hold."""


def load_presets(folder: Path) -> Presets:
    path = folder / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return UNMEASURED
    try:
        return presets_of(json.loads(text)["presets"])
    except (KeyError, TypeError, ValueError) as error:
        needed = ", ".join(MEASURED)
        raise BrokenPresets(
            f"{path}: needed steps and cache_interval, whole numbers above 0, of each of {needed}; "
            f"or remove it ({type(error).__name__}: {error})"
        ) from error


def preset_named(presets: Presets, name: str) -> dict[str, int]:
    """Its parameters of a picture. Raises InvalidParams for a name that is none."""
    if name not in presets:
        raise InvalidParams("quality", name, f"needed one of {', '.join(presets)}")
    return asdict(presets[name])


def presets_of(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Preset]:
    found = {name: Preset(**values[name]) for name in MEASURED}
    for preset in found.values():
        if not all(type(value) is int and value > 0 for value in asdict(preset).values()):
            raise ValueError(f"{preset} is not allowed")
    return {**found, **EXACT}


def told(presets: Presets) -> list[str]:
    return [f"{name} {p.steps} steps, interval {p.cache_interval}" for name, p in presets.items()]


def as_file(presets: Presets, measured: Mapping[str, Any]) -> bytes:
    """`measured`: what they were found on."""
    own = {name: asdict(presets[name]) for name in MEASURED}
    return (json.dumps({"presets": own, "measured": measured}, indent=1) + "\n").encode()
