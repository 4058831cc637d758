"""From the errors of single steps to that of a whole plan, corrected by plans that were tried.

What a step's error becomes in the end, the later steps decide: each step has a gain, fitted to
trials. Errors of several steps may add up as independent ones do (their squares) or as ones that
point the same way (themselves); the power is the one of the two that the trials bear out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.tuning.course import ages

POWERS = (1, 2)
PULL = 0.1
"""of every gain towards the mean one, where trials say little of it"""

StepErrors = Sequence[Sequence[float]]
"""of every step, by the age of the features that it reads, from 1 on"""
Deep = tuple[int, ...]


@dataclass(frozen=True)
class Prediction:
    power: int
    gains: tuple[float, ...]
    """of every step's error, raised to the power"""
    misfit: float
    """the mean of |log2| of predicted over found: 1 is a factor of two"""

    def terms(self, errors: StepErrors) -> list[list[float]]:
        """What every step adds; see search.py."""
        return [
            [gain * error**self.power for error in row]
            for gain, row in zip(self.gains, errors, strict=True)
        ]

    def of(self, errors: StepErrors, deep_steps: Deep) -> float:
        added = powered(errors, deep_steps, self.power) @ np.array(self.gains)
        return float(added) ** (1 / self.power)


def powered(errors: StepErrors, deep_steps: Deep, power: int) -> NDArray[np.float64]:
    """Each step's error in this plan, raised to the power; a deep one has none."""
    each = zip(ages(deep_steps, len(errors)), errors, strict=True)
    return np.array([row[age - 1] ** power if age else 0.0 for age, row in each])


def fit(errors: StepErrors, found: Mapping[Deep, float]) -> Prediction:
    """`found` are the errors of plans that were tried to the end; without any, all gains are 1."""
    tried = {deep: error for deep, error in found.items() if len(deep) < len(errors) and error > 0}
    if not tried:
        return Prediction(2, (1.0,) * len(errors), math.nan)
    return min((_fitted(errors, tried, power) for power in POWERS), key=lambda each: each.misfit)


def _fitted(errors: StepErrors, found: Mapping[Deep, float], power: int) -> Prediction:
    from scipy.optimize import nnls

    # Divided by what was found, so that a plan of small errors says as much as one of large ones.
    rows = np.stack([powered(errors, deep, power) / e**power for deep, e in found.items()])
    mean = max(len(rows) / rows.sum(), 1e-12)
    scaled = np.vstack([rows * mean, PULL * np.eye(len(errors))])
    wanted = np.concatenate([np.ones(len(rows)), PULL * np.ones(len(errors))])
    gains = mean * nnls(scaled, wanted)[0]
    predicted = (rows @ gains) ** (1 / power)
    misfit = np.abs(np.log2(np.maximum(predicted, 1e-9))).mean()
    return Prediction(power, tuple(map(float, gains)), float(misfit))
