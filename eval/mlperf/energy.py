"""What the GPUs used while a run was measured, where there is a meter. The figures stand beside
LoadGen's own, which judges none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from eval.mlperf.loadgen import Summary

T = TypeVar("T")
Meter = Callable[[], float]
"""joules so far"""
RATE = "images/s"
"""the unit of scores that are a rate"""


@dataclass(frozen=True)
class EnergyUse:
    joules: float
    took_s: float

    @property
    def watts(self) -> float:
        return self.joules / self.took_s

    def of(self, summary: Summary) -> dict[str, float]:
        """Its figures; the rate for each watt where the scenario has a rate."""
        found = {"joules": self.joules, "watts": self.watts}
        if summary.unit == RATE and summary.score is not None:
            found["samples_per_s_per_watt"] = summary.score / self.watts
        return found

    def text(self, summary: Summary) -> str:
        share = self.of(summary).get("samples_per_s_per_watt")
        told = "" if share is None else f", {share:.4g} samples/s/W"
        return f", {self.joules:.0f} J at {self.watts:.1f} W{told}"


def metered(read: Meter | None, run: Callable[[], T]) -> tuple[T, EnergyUse | None]:
    """None without a meter, and where it stood still or fell: then it is none of this run."""
    before, began_s = read() if read else 0.0, time.perf_counter()
    found = run()
    took_s, joules = time.perf_counter() - began_s, (read() if read else 0.0) - before
    return found, EnergyUse(joules, took_s) if joules > 0 else None
