"""Bootstrap intervals: as wide as theory says, around the value, the same every time."""

from __future__ import annotations

import pytest
import torch

from eval.measuring.bootstrap import interval

VALUES = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()


def mean(rows: torch.Tensor) -> float:
    return float(VALUES[rows].mean())


def test_a_means_interval_is_as_wide_as_the_normal_one() -> None:
    found = interval(float(VALUES.mean()), mean, len(VALUES), 1000)
    expected = 2 * 1.96 * float(VALUES.std()) / len(VALUES) ** 0.5
    assert found.high - found.low == pytest.approx(expected, rel=0.15)


def test_a_biased_score_keeps_its_value_inside() -> None:
    """Like FID, whose resamples are all above it."""
    found = interval(5.0, lambda rows: 9.0 + mean(rows), len(VALUES), 200)
    assert found.low < 5.0 < found.high, found


def test_it_is_the_same_every_time() -> None:
    assert interval(0.0, mean, len(VALUES), 20) == interval(0.0, mean, len(VALUES), 20)
