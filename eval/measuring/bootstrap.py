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
    """How far a set of as many rows may lie from `value`; `score` takes the indices of rows drawn.

    The resamples' spread about their own mean, laid around the value: FID of a resample is biased
    upwards, since it repeats pictures, and percentiles alone would not even hold the value.
    """
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.tensor(
        [score(torch.randint(count, (count,), generator=generator)) for _ in range(rounds)],
        dtype=torch.float64,
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = (drawn - drawn.mean()).quantile(torch.tensor([tail, 1 - tail]).double())
    return Interval(value + float(low), value + float(high))
