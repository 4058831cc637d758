"""The Inception network of 2015-12-05 that defines FID: pictures to 2048 features.

Its tensors have the names of the usual PyTorch port, `pt_inception-2015-12-05` of pytorch-fid,
whose weights load strictly. FID's definition differs from the textbook network in three ways:
average pools do not count their padding, the last block pools by the maximum, and pictures are
resized without anti-aliasing, as in the benchmark's reference. The architecture: Szegedy et al.,
"Rethinking the Inception Architecture" (2015), figures 4 to 7.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eval.quality.protocol import INCEPTION_WIDTH
from sdxl.params import InvalidParams

SIDE = 299
CLASSES = 1008
UNREADABLE = (EOFError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError)
ROW, COLUMN = (1, 7), (7, 1)
Layer = tuple[str, int, Any]
"""name, output channels and kernel of a convolution"""
Branch = Sequence[Layer | list[Layer]]


class Conv(nn.Module):
    """Convolution, normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: Any, **more: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, bias=False, **more)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def largest(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, stride=1, padding=1)


class InceptionBlock(nn.Module):
    """Parallel branches of layers, and a pool with a layer of `pooled` channels. If `pooled` is 0,
    the pool and the last layer of each branch halve the size. Layers in a list are parallel."""

    def __init__(
        self,
        inputs: int,
        *branches: Branch,
        pooled: int = 0,
        pool: Callable[[Tensor], Tensor] = average,
    ) -> None:
        super().__init__()
        self.pool = pool
        self.branches = [
            [each if isinstance(each, list) else [each] for each in branch] for branch in branches
        ]
        for branch in self.branches:
            width = inputs
            for layers in branch:
                for name, outputs, kernel in layers:
                    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
                    same: dict[str, Any] = {"padding": tuple(side // 2 for side in sides)}
                    halves = not pooled and layers is branch[-1]
                    layer = Conv(width, outputs, kernel, **({"stride": 2} if halves else same))
                    self.add_module(name, layer)
                width = layers[0][1]
        self.branch_pool = Conv(inputs, pooled, 1) if pooled else None

    def forward(self, x: Tensor) -> Tensor:
        parts = [self._branch(x, branch) for branch in self.branches]
        if self.branch_pool is None:
            return torch.cat([*parts, F.max_pool2d(x, 3, stride=2)], 1)
        return torch.cat([*parts, self.branch_pool(self.pool(x))], 1)

    def _branch(self, x: Tensor, branch: Sequence[list[Layer]]) -> Tensor:
        for layers in branch:
            x = torch.cat([self.get_submodule(name)(x) for name, *_ in layers], 1)
        return x


def block_a(inputs: int, pooled: int) -> InceptionBlock:
    """35×35: 1×1, 5×5, two 3×3, and a pool."""
    five = [("branch5x5_1", 48, 1), ("branch5x5_2", 64, 5)]
    three = [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)]
    return InceptionBlock(inputs, [("branch1x1", 64, 1)], five, three, pooled=pooled)


def block_b(inputs: int) -> InceptionBlock:
    """35×35 to 17×17."""
    three = [("branch3x3dbl_1", 64, 1), ("branch3x3dbl_2", 96, 3), ("branch3x3dbl_3", 96, 3)]
    return InceptionBlock(inputs, [("branch3x3", 384, 3)], three)


def block_c(inputs: int, width: int) -> InceptionBlock:
    """17×17: 7×7 as rows and columns."""
    seven = [("branch7x7_1", width, 1), ("branch7x7_2", width, ROW), ("branch7x7_3", 192, COLUMN)]
    kernels = [(width, 1), (width, COLUMN), (width, ROW), (width, COLUMN), (192, ROW)]
    twice = [(f"branch7x7dbl_{n}", *each) for n, each in enumerate(kernels, 1)]
    return InceptionBlock(inputs, [("branch1x1", 192, 1)], seven, twice, pooled=192)


def block_d(inputs: int) -> InceptionBlock:
    """17×17 to 8×8."""
    kernels = [(192, 1), (192, ROW), (192, COLUMN), (192, 3)]
    seven = [(f"branch7x7x3_{n}", *each) for n, each in enumerate(kernels, 1)]
    return InceptionBlock(inputs, [("branch3x3_1", 192, 1), ("branch3x3_2", 320, 3)], seven)


def block_e(inputs: int, pool: Callable[[Tensor], Tensor]) -> InceptionBlock:
    """8×8: 3×3 split into a row and a column side by side."""

    def split(name: str) -> list[Layer]:
        return [(f"{name}a", 384, (1, 3)), (f"{name}b", 384, (3, 1))]

    three: Branch = [("branch3x3_1", 384, 1), split("branch3x3_2")]
    twice: Branch = [
        ("branch3x3dbl_1", 448, 1),
        ("branch3x3dbl_2", 384, 3),
        split("branch3x3dbl_3"),
    ]
    return InceptionBlock(inputs, [("branch1x1", 320, 1)], three, twice, pooled=192, pool=pool)


class Inception(nn.Module):
    """uint8 [n, 3, h, w] → float32 [n, 2048]."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3)
        self.Mixed_5b, self.Mixed_5c = block_a(192, 32), block_a(256, 64)
        self.Mixed_5d = block_a(288, 64)
        self.Mixed_6a = block_b(288)
        self.Mixed_6b, self.Mixed_6c = block_c(768, 128), block_c(768, 160)
        self.Mixed_6d, self.Mixed_6e = block_c(768, 160), block_c(768, 192)
        self.Mixed_7a = block_d(768)
        self.Mixed_7b, self.Mixed_7c = block_e(1280, average), block_e(2048, largest)
        self.fc = nn.Linear(INCEPTION_WIDTH, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        x = pictures.float() / 255
        x = F.interpolate(x, (SIDE, SIDE), mode="bilinear", align_corners=False) * 2 - 1
        for name, block in self.named_children():
            if name == "fc":
                break
            x = block(x)
            if name in ("Conv2d_2b_3x3", "Conv2d_4a_3x3"):
                x = F.max_pool2d(x, 3, stride=2)
        return x.mean((2, 3))


def load_inception(path: Path) -> Inception:
    """From `pt_inception-2015-12-05-….pth`."""
    needed = "must be the weights of pt_inception-2015-12-05"
    network = Inception()
    try:
        # Tensors only: a pickle could run code.
        network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except UNREADABLE as error:
        line = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidParams("inception", str(path), f"{needed} ({line})") from error
    return network.eval().requires_grad_(False)
