"""A statistic that the reference recipe has and Model Optimizer lacks: means step by step.

Of an input's absolute maxima it takes the mean over all calls of one denoising step, and of these
means the smallest: a rare outlier in one picture, or at one step, does not coarsen the scale. Which
step it is, a clock says: a layer that shallow steps leave out is not called at every one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from onnx_export.calibration import StepClock


def mean_calibrator(clock: StepClock) -> tuple[Any, ...]:
    """As Model Optimizer's configuration names a calibrator: what to call, and with what."""
    from modelopt.torch.quantization.calib import MaxCalibrator

    class MeanCalibrator(MaxCalibrator):
        def __init__(self) -> None:
            super().__init__()
            self.reset()

        def reset(self) -> None:
            self._maxima: dict[int, list[Tensor]] = defaultdict(list)

        def collect(self, x: Tensor) -> None:
            self._maxima[clock.step].append(x.detach().abs().amax())

        def compute_amax(self) -> Tensor | None:
            if not self._maxima:
                return None
            return torch.stack([torch.stack(m).mean() for m in self._maxima.values()]).min()

    return (MeanCalibrator, (), {})
