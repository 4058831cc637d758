"""The Fréchet distance, against scipy's matrix root and closed forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from eval.quality.frechet import FrechetDistance, Gaussian, read_statistics
from sdxl.params import InvalidParams

WIDTH = 24


def features(count: int, seed: int, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return torch.randn(count, WIDTH, generator=generator) @ mix * (1 + shift) + shift


def by_scipy(fake: Tensor, real: Tensor) -> float:
    """The distance by its definition."""
    a, b = fake.double().numpy(), real.double().numpy()
    of_means = a.mean(0) - b.mean(0)
    covariances = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1]).real
    return float(of_means @ of_means + np.trace(covariances[0] + covariances[1] - 2 * root))


@pytest.mark.parametrize("count", [500, 60, WIDTH // 2])
def test_distances_equal_scipy(count: int) -> None:
    fake, real = features(count, 1, shift=0.2), features(400, 2)
    distance = FrechetDistance(Gaussian.of(real.split(170)))(fake)
    assert distance == pytest.approx(by_scipy(fake, real), rel=1e-4)


def test_the_distance_of_a_set_to_itself_is_zero() -> None:
    rows = features(300, 3)
    distance = FrechetDistance(Gaussian.of([rows]))(rows)
    size = float(Gaussian.of([rows]).covariance.trace())
    assert abs(distance) < 1e-8 * size, f"{distance}, of a spread of {size}"


def test_statistics_have_the_format_of_pytorch_fid(tmp_path: Path) -> None:
    real = Gaussian.of([features(100, 7)])
    np.savez(tmp_path / "s.npz", mu=real.mean.numpy(), sigma=real.covariance.numpy())
    stored = read_statistics(tmp_path / "s.npz", WIDTH)
    assert torch.equal(stored.mean, real.mean)
    with pytest.raises(InvalidParams, match=r"statistics must be an .npz with mu \[2048\]"):
        read_statistics(tmp_path / "s.npz", 2048)
