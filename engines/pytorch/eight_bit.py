"""Layers in 8 bits for the torch backend: FP8 E4M3 or INT8 weights and inputs, by the numbers that
an export stores for its graphs.

On a GPU products run in 8 bits; elsewhere the stored numbers are multiplied in float32, which is
what the GPU's results are held against. Which layers, and with which scales, is the export's
business: what the file does not name stays as it is. int8 has no value for what is not a number:
the row's flag has, and goes into the network's result.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from engines.folders.export_folder import INPUT_SCALE, SCALE, SMOOTHING, WEIGHT
from engines.pytorch.kernel_switch import has_kernels, kernels, products

log = logging.getLogger(__name__)

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
PROBED = 256, 1280
"""tokens and channels: a library may refuse what is smaller than it is ever given here"""
MAX_ROWS = 1024
"""of a call, at the most; more than any memory holds"""


class EightBit(nn.Module):
    """A linear layer, or a 3×3 convolution of stride 1. `weight` is [out, in], or [out, 3, 3, in];
    `steps` turns an input channel's unit into steps of the 8-bit number. `flags`, one for each row
    of a call and shared by a network's layers, are 0 or NaN."""

    weight: Tensor
    scale: Tensor
    steps: Tensor
    bias: Tensor
    flags: Tensor
    half_bias: Tensor

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        steps: Tensor,
        bias: Tensor,
        flags: Tensor | None = None,
    ) -> None:
        super().__init__()
        own = torch.zeros(MAX_ROWS, device=weight.device) if flags is None else flags
        named = {"weight": weight, "scale": scale, "steps": steps, "bias": bias, "flags": own}
        # As PyTorch's own product takes it: converted at each call it would be a pass of its own.
        named["half_bias"] = bias.half()
        for name, value in named.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def number(self) -> torch.dtype:
        return self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.stored(x), x.dtype)

    def stored(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """A map, or tokens, in steps of the 8-bit number, after `added` was."""
        if has_kernels(x):
            x = _channels_last(x)
            found: Tensor = kernels().affine(x, added=added, **self.rounding)
            return found
        total = x.float() if added is None else x.float() + added.float()
        return self.rounded(total * _along_channels(self.steps, x))

    @property
    def rounding(self) -> dict[str, Any]:
        """What a kernel that rounds needs of the layer that reads its result."""
        found: dict[str, Any] = {"steps": self.steps, "number": self.number, "flags": self.flags}
        is_convolution = self.weight.dim() > 2
        if is_convolution:
            found["is_bordered"] = products().fits_tma(self.weight)
        return found

    def rounded(self, steps: Tensor) -> Tensor:
        largest = LARGEST[self.number]
        if self.number == torch.int8:
            is_broken = steps.isnan()
            self.flags[: len(steps)].masked_fill_(is_broken.flatten(1).any(1), torch.nan)
            steps = steps.masked_fill(is_broken, 0).round()
        return steps.clamp(-largest, largest).to(self.number)

    def product(self, stored: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        if not has_kernels(stored):
            return in_type(self._reference(stored, residual), dtype)
        # PyTorch's own gives halves and floats.
        is_linear = self.weight.dim() == 2 and residual is None and dtype not in LARGEST
        if is_linear and self.number != torch.int8 and has_scaled_mm(stored.device, dtype):
            return self._scaled_mm(stored, dtype)
        found: Tensor = products().product(
            stored,
            self.weight,
            self.scale,
            self.bias,
            dtype,
            None if residual is None else _channels_last(residual),
        )
        return found

    def turned(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Of tokens, [out, rows, tokens]: each channel's tokens side by side."""
        if not has_kernels(stored):
            return in_type(self._reference(stored, None), dtype).permute(2, 0, 1)
        found: Tensor = products().turned_product(stored, self.weight, self.scale, self.bias, dtype)
        return found

    def _scaled_mm(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        tokens = stored.reshape(-1, stored.shape[-1])
        out = torch._scaled_mm(
            tokens,
            self.weight.t(),
            _ones(tokens.shape[0], stored.device),
            self.scale[None],
            bias=self.half_bias.to(dtype),
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return out.view(*stored.shape[:-1], -1)

    def _reference(self, stored: Tensor, residual: Tensor | None) -> Tensor:
        weight = self.weight.float() * self.scale.view(-1, *[1] * (self.weight.dim() - 1))
        if self.weight.dim() == 2:
            out = F.linear(stored.float(), weight, self.bias)
        else:
            out = F.conv2d(stored.float(), weight.permute(0, 3, 1, 2), self.bias, padding=1)
        return out if residual is None else out + residual.float()


def rounded_lines(weight: Tensor, number: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each of its lines, [lines, in], in steps of its own, and these."""
    largest = LARGEST[number]
    steps = (weight.abs().amax(1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    weight = weight / steps[:, None]
    weight = weight.round() if number == torch.int8 else weight
    return weight.clamp(-largest, largest).to(number), steps


def in_type(value: Tensor, dtype: torch.dtype) -> Tensor:
    """As our kernels store it: what is too large for E4M3 is the largest."""
    largest = LARGEST.get(dtype)
    return (value if largest is None else value.clamp(-largest, largest)).to(dtype)


class Flagged(nn.Module):
    """A network with 8-bit layers: its first result is NaN for a row whose flag was raised."""

    def __init__(self, network: nn.Module, flags: Tensor) -> None:
        super().__init__()
        self.network, self.flags = network, flags

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.flags.zero_()
        first, *others = self.network(*inputs)
        broken = self.flags[: len(first)].to(first.dtype).view(-1, *[1] * (first.dim() - 1))
        return (first + broken, *others)


def flagged(network: nn.Module) -> nn.Module:
    """The network itself where FP8, which has a NaN, or no 8 bits are in it."""
    found = (m for m in network.modules() if isinstance(m, EightBit) and m.number == torch.int8)
    layer = next(found, None)
    return network if layer is None else Flagged(network, layer.flags)


def quantise(unet: nn.Module, *files: Path) -> tuple[str, ...]:
    """Put 8-bit layers in the place of those that the files hold numbers for; their names."""
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return put_layers(unet, tensors)


def put_layers(unet: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    names = [key.removesuffix(INPUT_SCALE) for key in tensors if key.endswith(INPUT_SCALE)]
    flags = torch.zeros(MAX_ROWS, device=next(unet.parameters()).device)
    for name in names:
        parent, _, child = name.rpartition(".")
        layer = _layer(unet.get_submodule(name), name, tensors, flags)
        setattr(unet.get_submodule(parent), child, layer)
    return tuple(names)


def _layer(module: Any, name: str, tensors: Mapping[str, Tensor], flags: Tensor) -> EightBit:
    weight, device = tensors[name + WEIGHT], module.weight.device
    if weight.dim() == 4:
        weight = weight.permute(0, 2, 3, 1).contiguous()
    input_scale = tensors[name + INPUT_SCALE].float()
    smoothing = tensors.get(name + SMOOTHING)
    steps = torch.ones(weight.shape[-1]) if smoothing is None else smoothing.float()
    bias = torch.zeros(weight.shape[0]) if module.bias is None else module.bias.float()
    scale = tensors[name + SCALE].float() * input_scale
    numbers = (weight, scale, steps / input_scale, bias)
    weight, scale, steps, bias = (t.to(device) for t in numbers)
    return EightBit(weight, scale, steps, bias, flags)


def _channels_last(x: Tensor) -> Tensor:
    """With the channels next to each other in memory, as the kernels read them."""
    layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return x.contiguous(memory_format=layout)


def _along_channels(values: Tensor, x: Tensor) -> Tensor:
    return values[:, None, None] if x.dim() == 4 else values


@cache
def _ones(count: int, device: torch.device) -> Tensor:
    """The inputs' scales, which the outputs' already hold. Kept: graphs know their address."""
    return torch.ones(count, 1, device=device)


@lru_cache(maxsize=8)
def has_scaled_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch's own 8-bit product takes a scale for each output channel here, into this
    type; tried once, in a size that the UNet has. What is only noted counts as having it."""
    return runs_scaled_mm(device, dtype) if device.type == "cuda" else device.type == "meta"


def runs_scaled_mm(device: torch.device, dtype: torch.dtype) -> bool:
    rows, channels = PROBED
    x, weight = (
        torch.ones(count, channels, device=device).to(torch.float8_e4m3fn)
        for count in (rows, channels)
    )
    scale, steps, bias = torch.ones(3, channels, device=device)
    layer = EightBit(weight, scale, steps, bias)
    try:
        layer._scaled_mm(x, dtype)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        log.warning("PyTorch's FP8 product does not run here, ours takes its place: %s", error)
        return False
    return True
