"""The Fréchet distance between sets of features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sdxl.params import InvalidParams


@dataclass(frozen=True)
class Gaussian:
    """The mean and covariance of a set of features, float64."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, chunks: Iterable[Tensor]) -> Gaussian:
        """The Gaussian of features [n, width] in chunks."""
        total = products = None
        count = 0
        for chunk in chunks:
            rows = chunk.double()
            sums, outer = rows.sum(0), rows.T @ rows
            total = sums if total is None else total + sums
            products = outer if products is None else products + outer
            count += len(rows)
        if total is None or products is None or count < 2:
            raise ValueError(f"statistics of {count} pictures; expected at least 2")
        mean = total / count
        return cls(mean, (products - count * torch.outer(mean, mean)) / (count - 1))


def read_statistics(path: Path, width: int) -> Gaussian:
    """Read an .npz with `mu` and `sigma`, the format of pytorch-fid."""
    needed = f"must be an .npz with mu [{width}] and sigma [{width}, {width}]"
    try:
        with np.load(path, allow_pickle=False) as stored:
            mean, covariance = (torch.from_numpy(stored[n]).double() for n in ("mu", "sigma"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidParams("statistics", str(path), f"{needed} ({error})") from error
    if mean.shape != (width,) or covariance.shape != (width, width):
        shapes = f"found {list(mean.shape)} and {list(covariance.shape)}"
        raise InvalidParams("statistics", str(path), f"{needed}; {shapes}")
    return Gaussian(mean, covariance)


class FrechetDistance:
    """Distances to one reference. The root of its covariance is computed once; then each distance
    is a symmetric problem."""

    def __init__(self, reference: Gaussian) -> None:
        self.reference = reference
        values, vectors = torch.linalg.eigh(reference.covariance)
        self.root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        self.trace = float(reference.covariance.trace())

    def __call__(self, features: Tensor) -> float:
        rows = features.double()
        mean = rows.mean(0)
        spread = (rows - mean) @ self.root / (len(rows) - 1) ** 0.5
        variance = float((rows - mean).square().sum() / (len(rows) - 1))
        # The root of the product has the singular values of `spread` as its eigenvalues.
        gram = spread @ spread.T if len(rows) < rows.shape[1] else spread.T @ spread
        overlap = float(torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().sum())
        of_means = float((mean - self.reference.mean).square().sum())
        return of_means + variance + self.trace - 2 * overlap
