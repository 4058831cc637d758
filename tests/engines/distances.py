"""Distances between tensors."""

from __future__ import annotations

from torch import Tensor

from engines.parity.findings import relative_norm


def check_near(found: Tensor, expected: Tensor, most: float, what: object = "") -> None:
    """Check the relative L2 of the difference."""
    measured = relative_norm(found, expected)
    print(f"{what}: {measured:.2e}")
    assert measured <= most, f"{what}: {measured:.2e}, at most {most}"
