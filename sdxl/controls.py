"""A request's ControlNets: map, strength and steps of each. It knows no files and no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from sdxl.parameter import parameter
from sdxl.pictured import MAX_PATH, Pictured, is_within

MODES = ("balanced", "prompt", "control", "guess")
"""The first three are "Balanced", "My prompt is more important" and "ControlNet is more important"
of stable-diffusion-webui's extension; the last is diffusers' `guess_mode`."""
POSITIVE_ONLY = ("control", "guess")
"""modes that do not guide the negative row"""
NONE, CANNY = "none", "canny"
PREPROCESSORS = (NONE, CANNY)
RESIZES = CROP, FILL, STRETCH = "crop", "fill", "stretch"
"""how a map of other proportions is fitted to the picture"""
TYPES = ("openpose", "depth", "scribble", "canny", "normal", "segment", "tile", "repaint")
"""a union's types of maps, in the order of their numbers (xinsir/controlnet-union-sdxl-1.0)"""


class Window(NamedTuple):
    """The steps in which a ControlNet guides a picture."""

    net: str
    begin: float = 0.0
    """share of the picture's steps"""
    end: float = 1.0
    """share of the picture's steps"""
    has_negative: bool = True
    """True if it also guides the negative row"""

    def covers(self, step: int, steps: int) -> bool:
        return is_within(self.begin, self.end, step, steps)

    def rows(self, rows: int) -> int:
        """Return the number of a step's rows that it guides."""
        return rows if self.has_negative else 1


@dataclass(frozen=True)
class Control(Pictured):
    FIELD: ClassVar[str] = "controls"
    FORM: ClassVar[str] = "NAME=FILE[:STRENGTH[:START-END]][:canny][:KEY=VALUE]"
    BARE: ClassVar[str] = "preprocess"

    image: str = parameter(
        "", "Map", "the map: a picture; without one, the image that is edited", high=MAX_PATH
    )
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
    low: int = parameter(100, "Low threshold", "canny's lower threshold", low=0, high=1000)
    high: int = parameter(200, "High threshold", "canny's upper threshold", low=0, high=1000)
    resize: str | None = parameter(
        None,
        "Resize",
        "for a map of other proportions: crop it, fill its sides with black, or stretch it",
        choices=RESIZES,
    )
    type: str | None = parameter(
        None, "Type", "type of a union's map (default: as preprocess)", choices=TYPES
    )

    @property
    def map_type(self) -> str | None:
        """The type of a union's map."""
        return self.type or (CANNY if self.preprocess == CANNY else None)

    def type_number(self, types: int) -> int:
        """Return the number of the map's type for a union with `types` types."""
        known = TYPES[:types]
        if self.map_type not in known:
            raise self.refused(f"type must be one of {', '.join(known)}")
        return known.index(self.map_type)

    @property
    def has_negative(self) -> bool:
        """True if it also guides the negative row."""
        return self.mode not in POSITIVE_ONLY

    def window(self, net: str) -> Window:
        return Window(net, self.start, self.end, self.has_negative)


def windows_of(controls: Sequence[Control]) -> tuple[Window, ...]:
    """Return the windows of ControlNets that need not be loaded."""
    return tuple(sorted(each.window(each.name) for each in controls if each.strength))
