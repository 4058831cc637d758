"""The benchmark's compliance tests, over the folders that runs left: TEST01 holds the pictures of a
performance run against those of the accuracy run; TEST04 shows that repeating one sample is not
quicker, so nothing was remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval.mlperf.loadgen import Summary
from eval.quality.accuracy_log import FILE, logged

SPEED_TOLERANCE = 0.10
LEAST_DB = 40.0
"""PSNR of the same picture made beside others: rounding, and no other picture"""


@dataclass(frozen=True)
class ComplianceResult:
    passed: bool
    text: str


def test01(accuracy: Path, performance: Path, audited: Path) -> ComplianceResult:
    """`accuracy`, `performance` and `audited` are folders of runs."""
    expected = dict(logged(accuracy / FILE))
    count = same = 0
    worst = float("inf")
    for index, found in logged(audited / FILE):
        count += 1
        same += found == expected[index]
        worst = min(worst, _psnr(found, expected[index]))
    speed = _slower(performance, audited)
    passed = count > 0 and worst >= LEAST_DB and abs(speed - 1) <= SPEED_TOLERANCE
    text = (
        f"{count} pictures, {same} the same bytes, PSNR at least {worst:.1f} dB (required "
        f"{LEAST_DB:.0f}); {speed:.3f} of the performance run's speed (required within "
        f"{SPEED_TOLERANCE:.0%})"
    )
    return ComplianceResult(passed, text)


def test04(performance: Path, audited: Path) -> ComplianceResult:
    speed = _slower(performance, audited)
    text = (
        f"one sample repeated: {speed:.3f} of the performance run's speed (required at most "
        f"{1 + SPEED_TOLERANCE})"
    )
    return ComplianceResult(speed <= 1 + SPEED_TOLERANCE, text)


def _slower(performance: Path, audited: Path) -> float:
    """The audited run's speed over the performance run's."""
    reference, found = Summary.read(performance), Summary.read(audited)
    assert reference.score and found.score, "a run without a result has raised before"
    ratio = found.score / reference.score
    return 1 / ratio if found.unit == "s" else ratio


def _psnr(found: bytes, expected: bytes) -> float:
    if len(found) != len(expected):
        return 0.0
    a, b = (np.frombuffer(data, np.uint8).astype(np.float64) for data in (found, expected))
    error = float(((a - b) ** 2).mean())
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))
