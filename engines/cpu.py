"""How many rows one call of the UNet takes on a processor."""

from __future__ import annotations

from collections.abc import Sequence

from sdxl.specs import Architecture

MOST_PIXELS = 2**15
"""of latents: two rows at SDXL's own size. One keeps every core busy; each more takes memory and
makes all of them wait."""


def rows_on_cpu(arch: Architecture, counts: Sequence[int]) -> tuple[int, ...]:
    """Those of `counts` that a picture of the model's own size allows; two at least, as guidance
    needs them."""
    most = max(MOST_PIXELS // arch.sample_size**2, 2)
    return tuple(rows for rows in counts if rows <= most)
