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


def resample(score: Callable[[Tensor], float], count: int, rounds: int) -> Tensor:
    """Return the scores of resamples of `count` rows; `score` takes the drawn indices. Every call
    draws the same indices, so the scores of two sets with equal captions are pairs."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.tensor(
        [score(torch.randint(count, (count,), generator=generator)) for _ in range(rounds)],
        dtype=torch.float64,
    )


def interval(value: float, scores: Tensor) -> Interval:
    """Return the interval of `value` from the scores of its resamples.

    The interval is the spread of the scores about their mean, centred on the value. FID of a
    resample is biased upwards because it repeats pictures, so percentiles would exclude the value.
    """
    tail = (1 - CONFIDENCE) / 2
    low, high = (scores - scores.mean()).quantile(torch.tensor([tail, 1 - tail]).double())
    return Interval(value + float(low), value + float(high))
