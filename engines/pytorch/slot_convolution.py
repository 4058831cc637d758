"""The UNet's 3×3 convolutions in 16 bits, with support for maps in slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.pytorch.launches import Rounding, triton_module
from engines.pytorch.slots import bordered_slot_of, sides_of


class SlotConvolution(nn.Module):
    """A convolution that supports maps in slots. Other maps go to the given convolution."""

    taps: Tensor
    """[out, 3, 3, in]"""
    scale: Tensor
    bias: Tensor
    float_bias: Tensor

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv
        taps, bias = conv.weight.detach().permute(0, 2, 3, 1).contiguous(), conv.bias.detach()
        # Both layouts share one memory.
        conv.weight = nn.Parameter(taps.permute(0, 3, 1, 2), requires_grad=False)
        exact = bias.float()
        buffers = {"taps": taps, "bias": bias, "float_bias": exact, "scale": torch.ones_like(exact)}
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, x.dtype)

    @property
    def rounding(self) -> Rounding:
        """The layout of a norm's result that this layer reads."""
        return Rounding(is_bordered=self._runs_by_descriptors)

    def product(self, x: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """Convolve. In slots, x may already be bordered."""
        if sides_of(x) is None:
            out: Tensor = self.conv(x)
            return out if residual is None else out + residual
        if not self._runs_by_descriptors:
            convolve = triton_module("slot_convolution").slot_convolution
            return convolve(x, self.taps, self.bias, self.conv.stride[0])
        if bordered_slot_of(x) is None:
            x = triton_module("kernels").affine(x, rounding=self.rounding)
        product = triton_module("product").product
        return product(x, self.taps, self.scale, self.float_bias, dtype, residual)

    @property
    def _runs_by_descriptors(self) -> bool:
        return self.conv.stride == (1, 1) and self.conv.in_channels % 8 == 0
