"""Measured errors and their bounds, by precision. It runs nothing.

The bounds lie between the errors of rounding and the much larger errors of a wrong graph or plan. A
wrong scale shows at the first step. docs/log.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

STEP_BOUNDS = {"fp32": 0.001, "fp16": 0.02, "int8": 0.2, "fp8": 0.2}
"""relative L2 of the finished latents that a step predicts from the float32 reference's input"""
PICTURE_BOUNDS = {"fp32": 45.0, "fp16": 40.0, "int8": 20.0, "fp8": 20.0}
"""least PSNR in dB of the median picture to float32's. Errors grow along the steps, but the bound
does not depend on their number, so the finding names it."""
PLAN_BOUNDS = {**STEP_BOUNDS, "fp32": 0.01}
"""bounds of a plan's call; a GPU multiplies float32 in TF32"""
PLAN_PICTURE_BOUNDS = {**PICTURE_BOUNDS, "fp32": 40.0}
EIGHT_BIT_NETWORKS = ("unet_deep", "unet_shallow")
"""8-bit networks of an 8-bit export; the others are in 16 bits"""


class CheckFailed(RuntimeError):
    """An export or a build differs from its model."""


@dataclass(frozen=True)
class Finding:
    """A measured figure, with or without a bound."""

    what: str
    measured: float
    required: float | None = None
    is_least: bool = False

    @property
    def holds(self) -> bool:
        if self.required is None:
            return True
        sign = 1 if self.is_least else -1
        return sign * self.measured >= sign * self.required

    @property
    def line(self) -> str:
        return f"{self}{'' if self.holds else '   <-- does not hold'}"

    def __str__(self) -> str:
        measured = f"{self.what:<34} measured {self.measured:.3g}"
        if self.required is None:
            return measured
        return f"{measured}, required at {'least' if self.is_least else 'most'} {self.required:.3g}"


def plan_bound(network: str, precision: str) -> float:
    is_half = precision in ("int8", "fp8") and network not in EIGHT_BIT_NETWORKS
    return PLAN_BOUNDS["fp16" if is_half else precision]


def broken(findings: Iterable[Finding]) -> str:
    """Return the findings outside their bounds as one line."""
    return "; ".join(str(finding) for finding in findings if not finding.holds)


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, divided by the largest value if that value is above 1."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def relative_norm(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def picture_findings(
    found: Tensor, expected: Tensor, bound: float, steps: int, course: str = ""
) -> Iterator[Finding]:
    """Compare pictures. The median must be within the bound; the worst is only reported."""
    size = "×".join(map(str, found.shape[:1:-1]))
    what = f"{len(found)} pictures of {size}, {steps} steps{course}, PSNR in dB"
    yield Finding(what, median_psnr(found, expected), bound, is_least=True)
    if len(found) > 1:
        yield Finding(f"the worst of these{course}, PSNR in dB", worst_psnr(found, expected))


def median_psnr(found: Tensor, expected: Tensor) -> float:
    """Return the median PSNR in dB, of an even number of pictures the lower median. If a model does
    not understand a prompt, rounding can decide between two pictures, so one different picture is
    no error."""
    return float(_psnr_of_each(found, expected).median())


def worst_psnr(found: Tensor, expected: Tensor) -> float:
    return float(_psnr_of_each(found, expected).min())


def _psnr_of_each(found: Tensor, expected: Tensor) -> Tensor:
    each = [psnr(a, b) for a, b in zip(found, expected, strict=True)]
    return torch.tensor(each, dtype=torch.float64)


def psnr(found: Tensor, expected: Tensor) -> float:
    """Return the PSNR of all pixels together in dB, at most 120."""
    error = float(((found - expected) / 2).double().square().mean())
    return float(-10 * torch.tensor(error, dtype=torch.float64).clamp(min=1e-12).log10())
