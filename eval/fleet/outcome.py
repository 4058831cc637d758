"""Counts and latencies of simulated pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eval.fleet.traffic import DEADLINE_S

BINS = np.geomspace(0.05, 200, 4000)
"""edges of the histogram of latencies, 0.2% apart"""


@dataclass
class Outcome:
    arrived: int = 0
    refused: int = 0
    late: int = 0
    loads: int = 0
    """files loaded for pictures"""
    gpu_s: float = 0.0
    latencies: Any = field(default_factory=lambda: np.zeros(len(BINS) + 1, np.int64))

    def note(self, latencies: Any) -> None:
        self.latencies += np.bincount(BINS.searchsorted(latencies), minlength=len(BINS) + 1)
        self.late += int(np.count_nonzero(latencies > DEADLINE_S))

    def add(self, other: Outcome) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def finished(self) -> int:
        return int(self.latencies.sum())

    def quantile(self, share: float) -> float:
        rank = int(self.latencies.cumsum().searchsorted(share * self.finished))
        return float(BINS[min(rank, len(BINS) - 1)])

    @property
    def mean_s(self) -> float:
        return float((self.latencies[:-1] * BINS).sum() / max(self.finished, 1))

    @property
    def goodput(self) -> float:
        """The share of pictures in time among those that ended or were refused."""
        known = self.finished + self.refused
        return (self.finished - self.late) / known if known else 1.0
