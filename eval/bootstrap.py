"""Confidence intervals by resampling what was measured. It does not know what the rows are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CONFIDENCE = 0.95
SEED = 0


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


def interval(value: float, score: Callable[[Tensor], float], count: int, rounds: int) -> Interval:
    """The basic bootstrap interval of `score`, which takes the indices of the rows drawn.

    Basic and not percentile: FID of a resample is biased upwards, since it repeats pictures; the
    basic interval takes the bias off (Davison and Hinkley, "Bootstrap Methods", 1997, section 5.2).
    """
    generator = torch.Generator().manual_seed(SEED)
    drawn = [
        score(torch.randint(count, (count,), generator=generator)) for _ in range(max(rounds, 1))
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.tensor(drawn, dtype=torch.float64).quantile(
        torch.tensor([tail, 1 - tail], dtype=torch.float64)
    )
    return Interval(2 * value - float(high), 2 * value - float(low))
