"""Paired timings: variants take turns in one process, so a ratio holds when the machine drifts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A figure over rounds: its median, and the least and the most that was seen."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def take_turns(
    variants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of every round by variant; each round runs all of them once, in turning order."""
    for variant in variants.values():
        for _ in range(warmup):
            variant()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for round_ in range(rounds):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            start = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(of: list[float], to: list[float]) -> Spread:
    """Round by round, how many times the first takes of the second."""
    return Spread.of([a / b for a, b in zip(of, to, strict=True)])
