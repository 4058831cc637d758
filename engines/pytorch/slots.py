"""Slots: maps of different sizes in one call.

A slot is a line of pixels that holds a picture's map of up to that many pixels, line by line; the
rest, its pads, are finite numbers that no picture reads. So a map is [rows, channels, 1, slot], and
a table has each row's height and width. Convolutions, norms and attention among pixels read the
table; everything else works on single pixels. It knows no modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

LEVELS = 3
"""of the UNet: each has a quarter of the pixels of the one before"""
LINE = 128
"""Places of a bordered slot are a multiple of it, so no tile of a product reads two slots."""
LARGE = 4096
"""pixels of slots whose bordered places are a multiple of 2 × LINE, for the largest tiles"""


def slot_of(height: int, width: int, standard: int) -> int | None:
    """Return the slot of a map, in pixels; None if it fits none. `standard` is the model's own
    side. Slots are an eighth apart, so that at most an eighth is unused."""
    if height % 2 ** (LEVELS - 1) or width % 2 ** (LEVELS - 1):
        # Lower levels would be stretched, not halved.
        return None
    step = standard**2 // 8
    while 16 * step < height * width:
        step *= 2
    while step > LINE * 4 ** (LEVELS - 1) and 8 * step >= height * width:
        step //= 2
    if step % (LINE * 4 ** (LEVELS - 1)):
        return None
    slot = math.ceil(height * width / step) * step
    fits = all(
        _fits(height >> level, width >> level, slot >> (2 * level)) for level in range(LEVELS)
    )
    return slot if fits else None


def bordered(slot: int) -> int:
    """Pixels of a slot whose map has a column of zeros behind each line, and zeros behind the
    last."""
    line = 2 * LINE if slot >= LARGE else LINE
    return slot + line * math.ceil(3 * math.sqrt(slot) / line)


def widest(slot: int) -> int:
    """The widest map of a slot."""
    return 2 * math.isqrt(slot) - 2


def _fits(height: int, width: int, slot: int) -> bool:
    """Whether enough zeros follow for the first line of the next row, however wide that is."""
    return width <= widest(slot) and height * (width + 1) + widest(slot) + 2 <= bordered(slot)


@dataclass(frozen=True)
class Slots:
    """The maps of a call by the pixels of their memory, bordered or not."""

    sides: Mapping[int, Tensor]
    """int32 [rows, 2]: each row's height and width"""
    slot_of_bordered: Mapping[int, int]

    @classmethod
    def of(cls, slot: int, sides: Tensor) -> Slots:
        levels = {slot >> (2 * level): (sides >> level).contiguous() for level in range(LEVELS)}
        of_bordered = {bordered(each): each for each in levels}
        both = {**levels, **{each: levels[plain] for each, plain in of_bordered.items()}}
        return cls(both, of_bordered)


_slots: ContextVar[Slots | None] = ContextVar("slots", default=None)


@contextmanager
def in_slots(slot: int, sides: Tensor) -> Iterator[None]:
    """Maps of `slot` pixels and of the levels below hold pictures with these sides."""
    token = _slots.set(Slots.of(slot, sides))
    try:
        yield
    finally:
        _slots.reset(token)


def sides_of(x: Tensor) -> Tensor | None:
    """Each row's height and width if x, a map or tokens, lies in slots."""
    slots = _slots.get()
    if slots is None:
        return None
    return slots.sides[x.shape[2] * x.shape[3] if x.dim() == 4 else x.shape[1]]


def bordered_slot_of(x: Tensor) -> int | None:
    """The slot whose bordered form x has."""
    slots = _slots.get()
    return None if slots is None or x.dim() != 4 else slots.slot_of_bordered.get(x.shape[3])
