"""Bootstrap intervals have the right width and place, and are deterministic."""

from __future__ import annotations

import pytest
import torch

from eval.measuring.bootstrap import interval, resample

VALUES = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()


def mean(rows: torch.Tensor) -> float:
    return float(VALUES[rows].mean())


def test_the_interval_of_a_mean_has_the_normal_width() -> None:
    bounds = interval(float(VALUES.mean()), resample(mean, len(VALUES), 1000))
    expected = 2 * 1.96 * float(VALUES.std()) / len(VALUES) ** 0.5
    assert bounds.high - bounds.low == pytest.approx(expected, rel=0.15)


def test_the_interval_of_a_biased_score_contains_its_value() -> None:
    """Resamples of FID, too, are all higher than its value."""
    bounds = interval(5.0, resample(lambda rows: 9.0 + mean(rows), len(VALUES), 200))
    assert bounds.low < 5.0 < bounds.high, bounds


def test_resamples_are_the_same_each_time() -> None:
    assert resample(mean, len(VALUES), 20).equal(resample(mean, len(VALUES), 20))
