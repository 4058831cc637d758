"""The number of rows in one call of the UNet on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from sdxl.specs import Architecture

MOST_PIXELS = 2**15
"""of latents: two rows at SDXL's own size. One row keeps every core busy; more rows take memory and
delay all of them."""


def rows_on_cpu(arch: Architecture, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the `counts` that a picture of the model's own size allows, up to 2 at least: guidance
    needs two rows."""
    most = max(MOST_PIXELS // arch.sample_size**2, 2)
    return tuple(rows for rows in counts if rows <= most)
