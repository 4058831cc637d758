"""The ControlNets of a request: each with its map, strength and steps. It knows no files and no
tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple, Self

from sdxl.attachments import MAX_NAME, NAME
from sdxl.control_strengths import MODES
from sdxl.parameter import Attachment, InvalidParams, parameter, table_of

CONTROL_FILES = "control_files"
"""The key of a picture's metadata for the digests of ControlNets' files, by name."""
MAX_STRENGTH = 2
MAX_PATH = 4096
NONE, CANNY = "none", "canny"
PREPROCESSORS = (NONE, CANNY)
RESIZES = CROP, FILL, STRETCH = "crop", "fill", "stretch"
"""How a map of other proportions becomes one of the picture's."""
TYPES = ("openpose", "depth", "scribble", "canny", "normal", "segment", "tile", "repaint")
"""The maps of a union, in the order of its numbers (xinsir/controlnet-union-sdxl-1.0)."""
FORM = "NAME=FILE[:STRENGTH[:START-END]][:canny][:KEY=VALUE]"
NAME_AND_REST = re.compile(r"([^=:]+)(=?)(.*)", re.DOTALL)
STRENGTH = re.compile(r"-?[\d.]+", re.ASCII)
STEPS = re.compile(r"([\d.]+)-([\d.]+)", re.ASCII)


class Window(NamedTuple):
    """The steps in which a ControlNet guides a picture."""

    net: str
    begin: float = 0.0
    """shares of the picture's steps"""
    end: float = 1.0
    has_negative: bool = True
    """whether it guides the negative row, too"""

    def covers(self, step: int, steps: int) -> bool:
        """As in diffusers."""
        return self.begin <= step / steps and (step + 1) / steps <= self.end

    def rows(self, rows: int) -> int:
        """How many of a step's rows it guides."""
        return rows if self.has_negative else 1


@dataclass(frozen=True)
class Control(Attachment):
    name: str = parameter(MISSING, "Name", "its name, as the model lists it", high=MAX_NAME)
    image: str = parameter(
        "", "Map", "the map: a picture; without one, the image that is edited", high=MAX_PATH
    )
    strength: float = parameter(
        1.0, "Strength", "1 = full strength, 0 = none", low=0, high=MAX_STRENGTH
    )
    start: float = parameter(0.0, "Start", "share of the steps at which it begins", low=0, high=1)
    end: float = parameter(1.0, "End", "share of the steps at which it ends", low=0, high=1)
    mode: str = parameter(
        MODES[0],
        "Mode",
        "balanced; prompt or control: which of the two matters more; guess: without a prompt",
        choices=MODES,
    )
    preprocess: str = parameter(
        NONE,
        "Preprocessor",
        "canny draws the edges of the picture; none takes it as it is",
        choices=PREPROCESSORS,
    )
    low: int = parameter(100, "Low threshold", "of canny", low=0, high=1000)
    high: int = parameter(200, "High threshold", "of canny", low=0, high=1000)
    resize: str | None = parameter(
        None,
        "Resize",
        "for a map of other proportions: crop it, fill its sides with black, or stretch it",
        choices=RESIZES,
    )
    type: str | None = parameter(
        None, "Type", "what the map of a union shows (default: as preprocess)", choices=TYPES
    )

    @classmethod
    def form(cls) -> str:
        return FORM

    @classmethod
    def entries(cls, text: str) -> list[Any]:
        """Names of files may have commas: several entries are a JSON list."""
        if not text.lstrip().startswith("["):
            return [text]
        return list(json.loads(text))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Names of files may have colons: the other parts are read from the end."""
        match = NAME_AND_REST.fullmatch(text)
        if match is None:
            raise ValueError(f"must be {FORM}, got {text!r}")
        name, mark, rest = match.groups()
        parts, given = rest.split(":"), dict[str, Any]()
        while len(parts) > 1 and (option := _option(parts[-1])):
            given = option | given
            parts.pop()
        steps = STEPS.fullmatch(parts[-1]) if len(parts) > 1 else None
        if steps is not None:
            given |= {"start": float(steps[1]), "end": float(steps[2])}
            parts.pop()
        if len(parts) > 1 and STRENGTH.fullmatch(parts[-1]):
            given["strength"] = float(parts.pop())
        elif len(parts) > 1 and steps is not None and not parts[-1]:
            parts.pop()
        image = ":".join(parts).strip()
        if image and not mark:
            raise ValueError(f"must be {FORM}, got {text!r}")
        return cls(name.strip(), image, **given)

    def check(self, field: str) -> None:
        super().check(field)
        if not NAME.fullmatch(self.name or ""):
            raise InvalidParams(field, self.name, "must have names without : , < >")
        if self.start >= self.end:
            needed = f"with {self.name!r}: start must be below end, got {self.start} and {self.end}"
            raise InvalidParams(field, None, needed)

    @property
    def map_type(self) -> str | None:
        """What a union's map shows."""
        return self.type or (CANNY if self.preprocess == CANNY else None)

    def type_number(self, types: int) -> int:
        """The number of its map's type for a union that knows so many types."""
        known = TYPES[:types]
        if self.map_type not in known:
            needed = f"with {self.name!r}: type must be one of {', '.join(known)}"
            raise InvalidParams("controls", None, needed)
        return known.index(self.map_type)

    @property
    def has_negative(self) -> bool:
        """Whether it guides the negative row, too."""
        return self.mode not in ("control", "guess")

    def window(self, net: str) -> Window:
        return Window(net, self.start, self.end, self.has_negative)


def _option(text: str) -> dict[str, Any]:
    """Return the field that a part of the text form sets, if it is one. Raises ValueError."""
    if text in PREPROCESSORS:
        return {"preprocess": text}
    key, mark, value = text.partition("=")
    each = table_of(Control).get(key)
    return {key: each.parse(value)} if mark and each and key not in ("name", "image") else {}


def windows_of(controls: Sequence[Control]) -> tuple[Window, ...]:
    """The windows of ControlNets that are not loaded."""
    return tuple(sorted(each.window(each.name) for each in controls if each.strength))
