"""Slots: maps of different sizes in one call.

A slot is a line of pixels. It contains a picture's map line by line, and then pads, finite numbers
that do not affect the picture. A map in slots is [rows, channels, 1, slot], and a table has each
row's height and width. Convolutions, norms and attention among pixels read the table; all other
operations work on single pixels. It knows no modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

LEVELS = 3
"""levels of the UNet; each has a quarter of the pixels of the level above"""
LINE = 128
"""A bordered slot's size is a multiple of this, so no tile of a product reads two slots."""
LARGE = 4096
"""From this number of pixels, a bordered slot's size is a multiple of 2 × LINE, for the largest
tiles."""


def slot_of(height: int, width: int, standard: int) -> int | None:
    """Return the slot of a map, in pixels; None if no slot fits. `standard` is the model's own
    side. Slots are an eighth apart, so that at most an eighth is unused."""
    if height % 2 ** (LEVELS - 1) or width % 2 ** (LEVELS - 1):
        # Lower levels' sides would not be halves.
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
    """Return the size of a bordered slot: its map has a column of zeros behind each line, and zeros
    behind the last line."""
    line = 2 * LINE if slot >= LARGE else LINE
    return slot + line * math.ceil(3 * math.sqrt(slot) / line)


def widest(slot: int) -> int:
    """Return the width of a slot's widest map."""
    return 2 * math.isqrt(slot) - 2


def _fits(height: int, width: int, slot: int) -> bool:
    """Return whether a map fits its slot, with zeros behind it as the widest next map needs."""
    return width <= widest(slot) and height * (width + 1) + widest(slot) + 2 <= bordered(slot)


@dataclass(frozen=True)
class Slots:
    """The maps of a call by their size in memory, bordered or not."""

    sides: Mapping[int, Tensor]
    """int32 [rows, 2]: each row's height and width"""
    slot_of_bordered: Mapping[int, int]

    @classmethod
    def of(cls, slot: int, sides: Tensor) -> Slots:
        levels = {slot >> (2 * level): (sides >> level).contiguous() for level in range(LEVELS)}
        slot_of_bordered = {bordered(each): each for each in levels}
        sides_of_bordered = {each: levels[plain] for each, plain in slot_of_bordered.items()}
        return cls({**levels, **sides_of_bordered}, slot_of_bordered)


_slots: ContextVar[Slots | None] = ContextVar("slots", default=None)


@contextmanager
def in_slots(slot: int, sides: Tensor) -> Iterator[None]:
    """While the block runs, maps of `slot` pixels and of the levels below contain pictures with
    these sides."""
    token = _slots.set(Slots.of(slot, sides))
    try:
        yield
    finally:
        _slots.reset(token)


def sides_of(x: Tensor) -> Tensor | None:
    """Return each row's height and width if x, a map or tokens, is in slots."""
    slots = _slots.get()
    if slots is None:
        return None
    return slots.sides[x.shape[2] * x.shape[3] if x.dim() == 4 else x.shape[1]]


def bordered_slot_of(x: Tensor) -> int | None:
    """Return the slot if x is a map in bordered slots."""
    slots = _slots.get()
    return None if slots is None or x.dim() != 4 else slots.slot_of_bordered.get(x.shape[3])
