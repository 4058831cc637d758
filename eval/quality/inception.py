"""The Inception network of 2015-12-05 that FID is defined on: pictures to 2048 features.

Its tensors have the names of the PyTorch port in general use (`pt_inception-2015-12-05`, from
pytorch-fid), which must load strictly. Three things differ from the textbook network and are
part of the definition: average pools do not count their padding, the last block pools by the
maximum, and pictures are resized without anti-aliasing, as the benchmark's reference does it.
The architecture: Szegedy et al., "Rethinking the Inception Architecture" (2015), figures 4 to 7.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eval.quality.protocol import INCEPTION_WIDTH
from sdxl.params import InvalidParams

SIDE = 299
CLASSES = 1008
Size = int | tuple[int, int]
UNREADABLE = (EOFError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError)


class Conv(nn.Module):
    """Convolution, normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: Size, **more: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, bias=False, **more)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def row(inputs: int, outputs: int) -> Conv:
    """A 1×7 convolution that keeps the size."""
    return Conv(inputs, outputs, (1, 7), padding=(0, 3))


def column(inputs: int, outputs: int) -> Conv:
    """A 7×1 convolution that keeps the size."""
    return Conv(inputs, outputs, (7, 1), padding=(3, 0))


def average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class BlockA(nn.Module):
    """35×35: 1×1, 5×5, two 3×3, and a pool."""

    def __init__(self, inputs: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(inputs, 64, 1)
        self.branch5x5_1 = Conv(inputs, 48, 1)
        self.branch5x5_2 = Conv(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = Conv(inputs, 64, 1)
        self.branch3x3dbl_2 = Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, padding=1)
        self.branch_pool = Conv(inputs, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(average(x))], 1)


class BlockB(nn.Module):
    """35×35 to 17×17."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3 = Conv(inputs, 384, 3, stride=2)
        self.branch3x3dbl_1 = Conv(inputs, 64, 1)
        self.branch3x3dbl_2 = Conv(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), three, F.max_pool2d(x, 3, stride=2)], 1)


class BlockC(nn.Module):
    """17×17: 7×7 as rows and columns."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(inputs, 192, 1)
        self.branch7x7_1 = Conv(inputs, width, 1)
        self.branch7x7_2 = row(width, width)
        self.branch7x7_3 = column(width, 192)
        self.branch7x7dbl_1 = Conv(inputs, width, 1)
        self.branch7x7dbl_2 = column(width, width)
        self.branch7x7dbl_3 = row(width, width)
        self.branch7x7dbl_4 = column(width, width)
        self.branch7x7dbl_5 = row(width, 192)
        self.branch_pool = Conv(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        twice = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        twice = self.branch7x7dbl_5(self.branch7x7dbl_4(twice))
        return torch.cat([self.branch1x1(x), seven, twice, self.branch_pool(average(x))], 1)


class BlockD(nn.Module):
    """17×17 to 8×8."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3_1 = Conv(inputs, 192, 1)
        self.branch3x3_2 = Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Conv(inputs, 192, 1)
        self.branch7x7x3_2 = row(192, 192)
        self.branch7x7x3_3 = column(192, 192)
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        return torch.cat([three, self.branch7x7x3_4(seven), F.max_pool2d(x, 3, stride=2)], 1)


class BlockE(nn.Module):
    """8×8: 3×3 split into a row and a column side by side."""

    def __init__(self, inputs: int, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        self.branch1x1 = Conv(inputs, 320, 1)
        self.branch3x3_1 = Conv(inputs, 384, 1)
        self.branch3x3_2a = Conv(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3_2b = Conv(384, 384, (3, 1), padding=(1, 0))
        self.branch3x3dbl_1 = Conv(inputs, 448, 1)
        self.branch3x3dbl_2 = Conv(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = Conv(384, 384, (1, 3), padding=(0, 1))
        self.branch3x3dbl_3b = Conv(384, 384, (3, 1), padding=(1, 0))
        self.branch_pool = Conv(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_1(x)
        twice = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.is_last else average(x)
        parts = [
            self.branch1x1(x),
            self.branch3x3_2a(three),
            self.branch3x3_2b(three),
            self.branch3x3dbl_3a(twice),
            self.branch3x3dbl_3b(twice),
            self.branch_pool(pooled),
        ]
        return torch.cat(parts, 1)


class Inception(nn.Module):
    """uint8 [n, 3, h, w] → float32 [n, 2048]."""

    num_features = INCEPTION_WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3, padding=1)
        self.Conv2d_3b_1x1 = Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3)
        self.Mixed_5b, self.Mixed_5c = BlockA(192, 32), BlockA(256, 64)
        self.Mixed_5d = BlockA(288, 64)
        self.Mixed_6a = BlockB(288)
        self.Mixed_6b, self.Mixed_6c = BlockC(768, 128), BlockC(768, 160)
        self.Mixed_6d, self.Mixed_6e = BlockC(768, 160), BlockC(768, 192)
        self.Mixed_7a = BlockD(768)
        self.Mixed_7b, self.Mixed_7c = BlockE(1280, is_last=False), BlockE(2048, is_last=True)
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
    """From `pt_inception-2015-12-05-….pth`, or the same as safetensors."""
    needed = "needed the weights of pt_inception-2015-12-05"
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            weights = load_file(path)
        else:
            # Tensors only: a pickle could run code.
            weights = torch.load(path, map_location="cpu", weights_only=True)
        network = Inception()
        network.load_state_dict(weights)
    except UNREADABLE as error:
        line = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidParams("inception", str(path), f"{needed} ({line})") from error
    return network.eval().requires_grad_(False)
