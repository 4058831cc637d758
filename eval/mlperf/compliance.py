"""The benchmark's compliance tests, on the folders of runs. TEST01 compares the pictures of a
performance run with the accuracy run's. TEST04 shows that one repeated sample is no faster, because
no result is cached.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.measuring.psnr import psnr_db
from eval.mlperf.loadgen import Summary
from eval.quality.accuracy_log import FILE, read_pictures, read_samples
from sdxl.params import InvalidParams

SPEED_TOLERANCE = 0.10
LEAST_DB = 40.0
"""the least PSNR of a picture made in another batch, where only rounding differs"""


@dataclass(frozen=True)
class ComplianceResult:
    passed: bool
    text: str


def test01(accuracy: Path, performance: Path, audited: Path) -> ComplianceResult:
    """`accuracy`, `performance` and `audited` are folders of runs."""
    pictures = list(read_samples(audited / FILE))
    expected = read_pictures(accuracy / FILE, {index for index, _ in pictures})
    pairs = [(picture, expected.get(index, b"")) for index, picture in pictures]
    same = sum(a == b for a, b in pairs)
    worst = min((_psnr(a, b) for a, b in pairs), default=0.0)
    speed, invalid = _speed_ratio(performance, audited), _invalid(performance, audited)
    passed = worst >= LEAST_DB and abs(speed - 1) <= SPEED_TOLERANCE and not invalid
    text = (
        f"{len(pictures)} pictures, {same} the same bytes, PSNR at least {worst:.1f} dB (required "
        f"{LEAST_DB:.0f}); {speed:.3f} of the performance run's speed (required within "
        f"{SPEED_TOLERANCE:.0%}){invalid}"
    )
    return ComplianceResult(passed, text)


def test04(performance: Path, audited: Path) -> ComplianceResult:
    speed, invalid = _speed_ratio(performance, audited), _invalid(performance, audited)
    text = (
        f"one sample repeated: {speed:.3f} of the performance run's speed (required at most "
        f"{1 + SPEED_TOLERANCE}){invalid}"
    )
    return ComplianceResult(speed <= 1 + SPEED_TOLERANCE and not invalid, text)


def check_same(audited: Path, reference: Path) -> None:
    """Raise unless both runs have the same settings and the same system."""
    facts, others = read_facts(audited), read_facts(reference)
    for name in facts | others:
        if facts.get(name) != others.get(name):
            needed = f"must hold a run with {name} {facts.get(name)!r}, not {others.get(name)!r}"
            raise InvalidParams("out", str(reference), needed)


def read_facts(run: Path) -> dict[str, Any]:
    """The settings that must be equal: all but the measured speed and an audit's changes."""
    settings, system = (
        json.loads((run / name).read_text(encoding="utf-8"))
        for name in ("settings.json", "system.json")
    )
    facts = {name: settings[name] for name in ("scenario", "short", "captions")}
    facts |= {name: system.get(name) for name in ("model", "over", "replicas", "deterministic")}
    engines = {k: v for k, v in (system.get("engines") or {}).items() if k != "passed_over"}
    return facts | settings["request"] | engines


def _invalid(*runs: Path) -> str:
    names = [run.name for run in runs if not Summary.read(run).is_valid]
    return f"; LoadGen calls these runs INVALID: {', '.join(names)}" if names else ""


def _speed_ratio(performance: Path, audited: Path) -> float:
    """The audited run's speed over the performance run's."""
    reference, summary = Summary.read(performance), Summary.read(audited)
    assert reference.score and summary.score, "LoadGen accepted a run without a score"
    ratio = summary.score / reference.score
    return 1 / ratio if summary.unit == "s" else ratio


def _psnr(picture: bytes, expected: bytes) -> float:
    if len(picture) != len(expected):
        return 0.0
    return psnr_db(np.frombuffer(picture, np.uint8), np.frombuffer(expected, np.uint8))
