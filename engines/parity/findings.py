"""A measured figure beside the bound that it must hold, and the measures. It runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


class CheckFailed(RuntimeError):
    """An export or a build that is not the model it was made from."""


@dataclass(frozen=True)
class Finding:
    """One figure, and the bound that it must hold, if there is one."""

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

    def __str__(self) -> str:
        measured = f"{self.what:<34} measured {self.measured:.3g}"
        if self.required is None:
            return measured
        return f"{measured}, required at {'least' if self.is_least else 'most'} {self.required:.3g}"


def broken(findings: Iterable[Finding]) -> str:
    """Those that do not hold, as one line."""
    return "; ".join(str(finding) for finding in findings if not finding.holds)


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Over the largest value, where that is above 1."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def relative_norm(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def picture_findings(
    found: Tensor, expected: Tensor, bound: float, steps: int, course: str = ""
) -> Iterator[Finding]:
    """Whether pictures are those expected: their median decides, and the worst is told."""
    size = "×".join(map(str, found.shape[:1:-1]))
    what = f"{len(found)} pictures of {size}, {steps} steps{course}, PSNR in dB"
    yield Finding(what, median_psnr(found, expected), bound, is_least=True)
    if len(found) > 1:
        yield Finding(f"the worst of these{course}, PSNR in dB", worst_psnr(found, expected))


def median_psnr(found: Tensor, expected: Tensor) -> float:
    """In dB; of an even number of pictures the lower one. Words that mean nothing to a model lie
    between two pictures, and rounding decides which of them it paints: one such is no error."""
    return float(_psnr_of_each(found, expected).median())


def worst_psnr(found: Tensor, expected: Tensor) -> float:
    return float(_psnr_of_each(found, expected).min())


def _psnr_of_each(found: Tensor, expected: Tensor) -> Tensor:
    each = [psnr(a, b) for a, b in zip(found, expected, strict=True)]
    return torch.tensor(each, dtype=torch.float64)


def psnr(found: Tensor, expected: Tensor) -> float:
    """Over all pixels together, in dB; at most 120."""
    error = float(((found - expected) / 2).double().square().mean())
    return float(-10 * torch.tensor(error, dtype=torch.float64).clamp(min=1e-12).log10())
