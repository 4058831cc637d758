"""Confidence intervals by bootstrap."""

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
    """Return the interval of `value`; `score` takes the indices of a resample of `count` rows.

    It is the resamples' spread about their mean, centred on the value: FID of a resample is biased
    upwards because it repeats pictures, so percentiles alone would exclude the value.
    """
    generator = torch.Generator().manual_seed(SEED)
    scores = torch.tensor(
        [score(torch.randint(count, (count,), generator=generator)) for _ in range(rounds)],
        dtype=torch.float64,
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = (scores - scores.mean()).quantile(torch.tensor([tail, 1 - tail]).double())
    return Interval(value + float(low), value + float(high))
