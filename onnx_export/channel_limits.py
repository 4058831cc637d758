"""How far a channel of a smoothed input may reach: further than the calibrated pictures went.

SmoothQuant (arXiv:2211.10438) scales every channel so that its calibrated maximum comes near the
largest of all. A channel that seldom fires has a small one, by chance; taken at its word, the
channel is cut off as soon as another prompt makes it fire.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def channel_limits(maxima: Tensor, headroom: float) -> Tensor:
    """`headroom` times the channel's own maximum, or the mean channel's where that is more, and at
    most the largest of all. Channels that differ by less than the headroom get the same limit, as
    without smoothing; one that is far above the others is still brought down to them."""
    return (maxima.clamp(min=maxima.mean()) * headroom).clamp(max=maxima.max())


def limit_calibrator(headroom: float) -> tuple[Any, ...]:
    """As Model Optimizer's configuration names a calibrator: what to call, and with what."""
    from modelopt.torch.quantization.calib import MaxCalibrator

    class LimitCalibrator(MaxCalibrator):
        """Its `axis` is the channels', which SmoothQuant sets."""

        def compute_amax(self) -> Tensor | None:
            maxima = super().compute_amax()
            return None if maxima is None else channel_limits(maxima, headroom)

    return (LimitCalibrator, (), {})
