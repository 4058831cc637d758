"""A schedule as a table of coefficients, and one step for rows of any schedules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

COLUMNS = ("s", "timestep", "a", "b", "c", "d", "e", "f")


@dataclass(frozen=True)
class Table:
    """One request's schedule."""

    rows: Array
    """[steps, len(COLUMNS)]"""
    start: float
    """scale of the first noise"""
    levels: Array
    """[steps + 1, 2]: the scales of picture and noise at the start of each step and at the end"""

    def begun(self, at: int) -> Table:
        """Return the schedule from step `at` on. Its first step becomes first order."""
        if at == 0:
            return self
        rows = self.rows[at:].copy()
        a, b, c, e, f = (COLUMNS.index(name) for name in "abcef")
        rows[0, a] += rows[0, c] * rows[0, e]
        rows[0, b] += rows[0, c] * rows[0, f]
        rows[0, c] = 0.0
        return Table(rows, self.start, self.levels[at:])

    def renewed(self, at: int) -> Table:
        """Return the schedule with a first-order step `at`, at which another model takes over."""
        rows = self.rows.copy()
        rows[at:] = self.begun(at).rows
        return Table(rows, self.start, self.levels)

    def steps_before(self, timestep: float) -> int:
        """Count the steps that begin at this timestep or a noisier one."""
        return int((self.rows[:, COLUMNS.index("timestep")] >= timestep).sum())

    def noised(self, latents: Tensor, noise: Tensor, at: int = 0) -> Tensor:
        """Add noise to a picture's latents for the start of step `at`."""
        signal, level = self.levels[at]
        return float(signal) * latents + float(level) * noise


def columns(coefficients: Tensor) -> tuple[Tensor, ...]:
    """Split [n, len(COLUMNS)] into a view of each coefficient, which broadcasts over latents."""
    return coefficients[:, :, None, None, None].unbind(1)


def step(
    x: Tensor, eps: Tensor, h: Tensor | None, z: Tensor | None, coefficients: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Take one step of every row; return (x', h'). A row ignores h where its c is zero, and z where
    its d is zero, so stale memory (even NaN) cannot reach a new request. If all rows ignore h or z,
    it may be None. An infinite eps is not hidden."""
    # As few passes as possible: a small model's shallow step takes hardly longer than this.
    _, _, a, b, c, d, e, f = coefficients
    moved = (a * x).addcmul_(b, eps)
    for weight, value in ((c, h), (d, z)):
        if value is not None:
            moved.addcmul_(weight, torch.where(weight == 0, 0.0, value))
    return moved, (e * x).addcmul_(f, eps)
