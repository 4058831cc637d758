"""The measured maximum of this machine in matrix products and memory copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eval.measuring.timing import Run, device_s

SIDES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}
CONVOLVED = (8, 128, 32, 32)
"""rows, channels, height, width; output channels equal input channels"""
COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
ROUNDS = 5


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s of matrix products, and bytes/s of a copy (read and write)."""

    flops: float
    bytes: float

    def floor_s(self, flops: float, bytes: float) -> float:
        """The minimum seconds of a call with this work."""
        return max(flops / self.flops, bytes / self.bytes)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    flops = [_matmul(side, device, dtype) for side in SIDES[device.type]]
    if device.type == "cpu":
        # On some processors PyTorch's matrix product uses half of the vector units.
        flops.append(_convolution(dtype))
    return Ceilings(max(flops), _copy(device))


def _matmul(side: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty(side, side, device=device, dtype=dtype)
    return 2 * side**3 / fastest(lambda: torch.mm(a, b, out=out))


def _convolution(dtype: torch.dtype) -> float:
    rows, channels, height, width = CONVOLVED
    x = torch.randn(CONVOLVED).to(dtype)
    weight = torch.randn(channels, channels, 3, 3).to(dtype)
    flops = 2 * rows * height * width * channels * weight[0].numel()
    return flops / fastest(lambda: F.conv2d(x, weight, padding=1))


def _copy(device: torch.device) -> float:
    count = COPIED_BYTES[device.type]
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / fastest(lambda: target.copy_(source))


def fastest(run: Run) -> float:
    """Seconds of the fastest of several runs, without the first."""
    return min([device_s(run) for _ in range(ROUNDS + 1)][1:])
