"""Paired timings: variants take turns in one process, so that the machine's drift cancels."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Run = Callable[[], object]
Timed = Callable[[Run], float]
"""runs and returns the seconds"""


@dataclass(frozen=True)
class Spread:
    """The median, minimum and maximum of a figure over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that the share of values does not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan


def wall_s(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def device_s(run: Run) -> float:
    """Wall-clock seconds until the GPU, if there is one, is done."""
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cpu_s(run: Run) -> float:
    """CPU seconds of this process per thread. Other processes do not change them."""
    import torch

    start = time.process_time()
    run()
    return (time.process_time() - start) / torch.get_num_threads()


def take_turns(
    variants: Mapping[str, Run], rounds: int, warmup: int = 2, until_s: float = math.inf
) -> dict[str, list[float]]:
    """Seconds of every round by variant. Each round runs every variant once, in rotated order.
    After the first round, none begins past `until_s` on time.perf_counter."""
    for variant in variants.values():
        for _ in range(warmup):
            variant()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for round_ in range(rounds):
        if round_ and time.perf_counter() > until_s:
            break
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            seconds[name].append(device_s(variants[name]))
    return seconds


def ratio(dividends: list[float], divisors: list[float]) -> Spread:
    """The ratio of both, round by round."""
    return Spread.of([a / b for a, b in zip(dividends, divisors, strict=True)])
