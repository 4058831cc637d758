"""A statistic that the reference recipe has and Model Optimizer lacks: means step by step.

Of an input's absolute maxima it takes the mean over all calls of one denoising step, and of these
means the smallest: a rare outlier in one picture, or at one step, does not coarsen the scale. It
counts on one call a step, in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mean_calibrator(steps: int) -> tuple[Any, ...]:
    """As Model Optimizer's configuration names a calibrator: what to call, and with what."""
    from modelopt.torch.quantization.calib import MaxCalibrator

    class MeanCalibrator(MaxCalibrator):
        def __init__(self) -> None:
            super().__init__()
            self.reset()

        def reset(self) -> None:
            self._maxima: list[list[Tensor]] = [[] for _ in range(steps)]
            self._calls = 0

        def collect(self, x: Tensor) -> None:
            self._maxima[self._calls % steps].append(x.detach().abs().amax())
            self._calls += 1

        def compute_amax(self) -> Tensor | None:
            if not self._calls:
                return None
            return torch.stack([torch.stack(m).mean() for m in self._maxima if m]).min()

    return (MeanCalibrator, (), {})
