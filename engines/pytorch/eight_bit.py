"""Layers in 8 bits for the torch backend: FP8 E4M3 or INT8 weights and inputs, by the numbers that
an export stores for its graphs, and attention between such layers.

On a GPU products run in 8 bits; elsewhere the stored numbers are multiplied in float32, the
reference for the GPU's results. int8 cannot hold a NaN: it raises the row's flag, which becomes a
NaN in the network's result.

Attention and the VAE's decoder need no calibration: from 2^-6 to 448 E4M3 keeps the same relative
precision, and queries, keys, values and normed maps lie far inside.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from engines.folders.export_folder import INPUT_SCALE, SCALE, SMOOTHING, WEIGHT
from engines.low_rank import (
    addition,
    factors_of,
    is_adapting,
    name_layer,
    names_of,
    plus_loras,
)
from engines.pytorch.launches import LARGEST, capability_of, has_kernels, triton_module
from sdxl.networks.vae import SIDES, summed

log = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
CAPABILITY_OF_E4M3 = 8, 9
TINY = torch.finfo(torch.float32).tiny
SPREAD = 256.0
"""A softmax's shares are stored in E4M3 times this: it holds down to 2^-9."""
PROBED = 256, 1280
"""tokens and channels: a library may refuse sizes below those of the UNet"""
CONTROL_ROOM = 4.0
"""A ControlNet's inputs may be this many times as large as the UNet's."""
MAX_ROWS = 1024
"""rows of a call, more than any memory holds"""
MOST_TOKENS = 2**19
"""of a call: 32 rows at 2048×2048"""


class EightBit(nn.Module):
    """A linear layer, or a 3×3 convolution of stride 1.

    `weight` is [out, in] or [out, 3, 3, in]; `steps` turns an input channel's unit into steps of
    the 8-bit number. `flags`, one for each row of a call and shared by a network's layers, are 0 or
    NaN."""

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
        flags = torch.zeros(MAX_ROWS, device=weight.device) if flags is None else flags
        buffers = {"weight": weight, "scale": scale, "steps": steps, "bias": bias, "flags": flags}
        # PyTorch's own product takes halves: converting at each call would be an extra pass.
        for name, value in {**buffers, "half_bias": bias.half()}.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def number(self) -> torch.dtype:
        return self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        added = addition(self, x) if self.weight.dim() > 2 else None
        return self.product(self.stored(x), x.dtype, added)

    def stored(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Round x, or its sum with `added`, to steps of the 8-bit number; a map or tokens."""
        if has_kernels(x):
            x = _channels_last(x)
            return triton_module("kernels").affine(x, added=added, **self.rounding)
        total = x.float() if added is None else x.float() + added.float()
        steps = self.steps[:, None, None] if x.dim() == 4 else self.steps
        return self.rounded(total * steps)

    @property
    def rounding(self) -> dict[str, Any]:
        """The arguments of a kernel whose result this layer reads."""
        arguments: dict[str, Any] = {
            "steps": self.steps,
            "number": self.number,
            "flags": self.flags,
        }
        is_convolution = self.weight.dim() > 2
        if is_convolution:
            arguments["is_bordered"] = triton_module("product").fits_tma(self.weight)
        return arguments

    def rounded(self, steps: Tensor) -> Tensor:
        largest = LARGEST[self.number]
        if self.number == torch.int8:
            is_broken = steps.isnan()
            self.flags[: len(steps)].masked_fill_(is_broken.flatten(1).any(1), torch.nan)
            steps = steps.masked_fill(is_broken, 0).round()
        return steps.clamp(-largest, largest).to(self.number)

    def product(self, stored: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """Multiply what was rounded; of a linear layer, with what the call's LoRAs add."""
        if not has_kernels(stored):
            return in_type(self._reference(stored, residual), dtype)
        if (parts := len(names_of(self))) > 1 and is_adapting(self):
            return torch.cat([*self.products(stored, dtype, parts)], -1)
        if residual is None and self.is_scaled_mm(stored, dtype):
            return self._scaled_mm(stored, dtype)
        residual = None if residual is None else _channels_last(residual)
        product = triton_module("product").product
        given = stored, self.weight, self.scale, self.bias, dtype, residual
        return product(*given, self.low_rank(stored))

    def products(self, stored: Tensor, dtype: torch.dtype, parts: int) -> Sequence[Tensor]:
        """The products of the layers that this one joins, which have the same size."""
        if not (has_kernels(stored) and is_adapting(self)):
            return self.product(stored, dtype).chunk(parts, -1)
        joined = (each.chunk(parts) for each in (self.weight, self.scale, self.bias))
        product = triton_module("product").product
        return [
            product(stored, *own, dtype, None, self._low_rank_of(name, stored))
            for name, own in zip(names_of(self), zip(*joined, strict=True), strict=True)
        ]

    def low_rank(self, stored: Tensor) -> Any:
        """What the call's LoRAs add to a linear layer's product, for our kernels; None if
        nothing."""
        return self._low_rank_of(names_of(self)[0], stored) if self._has_low_rank else None

    def _low_rank_of(self, name: str, stored: Tensor) -> Any:
        factors = factors_of(name)
        if factors is None:
            return None
        return triton_module("low_rank").low_rank(stored, self.flags, *factors)

    @property
    def _has_low_rank(self) -> bool:
        return self.weight.dim() == 2 and is_adapting(self)

    def is_scaled_mm(self, stored: Tensor, dtype: torch.dtype) -> bool:
        """Whether PyTorch's own product runs, which gives halves and floats, without LoRAs."""
        if not has_kernels(stored) or self.weight.dim() != 2 or dtype in LARGEST:
            return False
        if self._has_low_rank:
            return False
        return self.number != torch.int8 and has_scaled_mm(stored.device, dtype)

    def turned(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """The product of tokens as [out, rows, tokens]: a channel's tokens lie side by side."""
        if not has_kernels(stored):
            return in_type(self._reference(stored, None), dtype).permute(2, 0, 1)
        turned_product = triton_module("product").turned_product
        given = stored, self.weight, self.scale, self.bias, dtype
        return turned_product(*given, self.low_rank(stored))

    def _scaled_mm(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        tokens, ones = stored.reshape(-1, stored.shape[-1]), _ones(stored.device)
        # Beyond all usual calls; inside a CUDA graph these are filled at each replay.
        ones = ones if len(tokens) <= len(ones) else torch.ones(len(tokens), 1, device=ones.device)
        out = torch._scaled_mm(
            tokens,
            self.weight.t(),
            ones[: len(tokens)],
            self.scale[None],
            bias=self.half_bias.to(dtype),
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return out.view(*stored.shape[:-1], -1)

    def _reference(self, stored: Tensor, residual: Tensor | None) -> Tensor:
        weight = self.weight.float() * self.scale.view(-1, *[1] * (self.weight.dim() - 1))
        if self.weight.dim() == 2:
            out = plus_loras(F.linear(stored.float(), weight, self.bias), self, stored)
        else:
            out = F.conv2d(stored.float(), weight.permute(0, 3, 1, 2), self.bias, padding=1)
        return out if residual is None else out + residual.float()


class EightBitQuarters(EightBit):
    """A 3×3 convolution of a doubled map, as four 2×2 convolutions of the map itself: one for each
    pixel that a pixel becomes, 4/9 of the arithmetic.

    `weight` is [4, out, 2, 2, in], line by line; `scale` has a value for each quarter's channel."""

    def _reference(self, stored: Tensor, residual: Tensor | None) -> Tensor:
        weight = self.weight.float() * self.scale.view(4, -1, 1, 1, 1)
        sides = [(*right, *down) for down in SIDES for right in SIDES]
        quarters = [
            F.conv2d(F.pad(stored.float(), side), quarter.permute(0, 3, 1, 2), self.bias)
            for side, quarter in zip(sides, weight, strict=True)
        ]
        lines = [torch.stack(pair, -1).flatten(-2) for pair in (quarters[:2], quarters[2:])]
        out = torch.stack(lines, 3).flatten(2, 3)
        return out if residual is None else out + residual.float()


def quartered(layer: EightBit) -> EightBitQuarters:
    """The quarters of a 3×3 convolution; sums of its weights are rounded once more."""
    weight = layer.weight.float()
    sums = [summed(summed(weight, 1, down), 2, right) for down in SIDES for right in SIDES]
    stored, share = rounded_lines(torch.cat(sums).flatten(1), layer.number)
    stored = stored.view(4, *sums[0].shape)
    return EightBitQuarters(
        stored, layer.scale.repeat(4) * share, layer.steps, layer.bias, layer.flags
    )


def rounded_lines(weight: Tensor, number: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round each line of [lines, in] in its own steps; the numbers and the steps."""
    largest = LARGEST[number]
    steps = (weight.abs().amax(1) / largest).clamp(min=TINY)
    weight = weight / steps[:, None]
    weight = weight.round() if number == torch.int8 else weight
    return weight.clamp(-largest, largest).to(number), steps


def in_type(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert as our kernels do: what is too large for E4M3 becomes the largest."""
    largest = LARGEST.get(dtype)
    return (value if largest is None else value.clamp(-largest, largest)).to(dtype)


class Flagged(nn.Module):
    """A network with int8 layers: its first result is NaN in rows whose flag was raised."""

    def __init__(self, network: nn.Module, flags: Tensor) -> None:
        super().__init__()
        self.network, self.flags = network, flags

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.flags.zero_()
        first, *others = self.network(*inputs)
        broken = self.flags[: len(first)].to(first.dtype).view(-1, *[1] * (first.dim() - 1))
        return (first + broken, *others)


def steps_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the steps of the inputs of linear 8-bit layers, by their names in a bank of LoRAs,
    which read the rounded numbers."""
    layers = (m for m in network.modules() if isinstance(m, EightBit) and m.weight.dim() == 2)
    return {name: layer.steps for layer in layers for name in names_of(layer)}


def flagged(network: nn.Module) -> nn.Module:
    """Wrap a network with int8 layers; FP8, which holds NaN, needs no flags."""
    layers = (m for m in network.modules() if isinstance(m, EightBit) and m.number == torch.int8)
    layer = next(layers, None)
    return network if layer is None else Flagged(network, layer.flags)


def quantise(unet: nn.Module, *files: Path) -> tuple[str, ...]:
    """Replace the layers that the files hold numbers for by 8-bit ones; return their names."""
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return put_layers(unet, tensors)


def put_layers(unet: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    names = [key.removesuffix(INPUT_SCALE) for key in tensors if key.endswith(INPUT_SCALE)]
    flags = torch.zeros(MAX_ROWS, device=next(unet.parameters()).device)
    # Made here, because a tensor made while a CUDA graph is captured lives in that graph's memory.
    _ones(flags.device)
    for name in names:
        parent, _, child = name.rpartition(".")
        module = unet.get_submodule(name)
        layer = _layer(module, name, tensors, flags)
        name_layer(layer, names_of(module))
        setattr(unet.get_submodule(parent), child, layer)
    return tuple(names)


def _layer(module: Any, name: str, tensors: Mapping[str, Tensor], flags: Tensor) -> EightBit:
    device = module.weight.device
    weight = tensors[name + WEIGHT].to(device)
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


def put_control_layers(net: nn.Module, *files: Path) -> None:
    """Put a ControlNet's layers in E4M3 by the numbers of the UNet's layers of the same names: a
    net begins as a copy of them, so its inputs are like theirs."""
    layers, made = dict(net.named_modules()), {}
    for file in files:
        with safe_open(file, "pt") as numbers:
            names = {*numbers.keys()}
            for key in filter(lambda each: each.endswith(INPUT_SCALE), names):
                name = key.removesuffix(INPUT_SCALE)
                layer: Any = layers.get(name)
                stored = numbers.get_slice(name + WEIGHT)
                if layer is None or [*layer.weight.shape] != stored.get_shape():
                    continue
                largest = LARGEST[torch.int8 if stored.get_dtype() == "I8" else E4M3]
                weight = layer.weight.detach().float()
                if name + SMOOTHING in names:
                    made[name + SMOOTHING] = numbers.get_tensor(name + SMOOTHING)
                    smoothing = made[name + SMOOTHING].to(weight)
                    weight = weight / smoothing.view(-1, *[1] * (weight.dim() - 2))
                lines, made[name + SCALE] = rounded_lines(weight.flatten(1), E4M3)
                made[name + WEIGHT] = lines.view(weight.shape)
                widened = CONTROL_ROOM * largest / LARGEST[E4M3]
                made[key] = widened * numbers.get_tensor(key).float()
    put_layers(net, made)


def put_decoder_layers(decoder: Any) -> None:
    """Put the ResBlocks' convolutions of the VAE's decoder, most of its arithmetic, in E4M3.

    They read a norm's result. The sums between them stay in 16 bits."""
    flags = torch.zeros(MAX_ROWS, device=decoder.conv_in.weight.device)
    for block in (decoder.mid_block, *decoder.up_blocks):
        for resnet in block.resnets:
            resnet.conv1, resnet.conv2 = (
                _decoder_layer(conv, flags) for conv in (resnet.conv1, resnet.conv2)
            )


def _decoder_layer(conv: nn.Conv2d, flags: Tensor) -> EightBit:
    weight = conv.weight.detach().float().permute(0, 2, 3, 1)
    # A filter of zeros may have any scale.
    scale = weight.flatten(1).abs().amax(1).clamp(min=TINY) / LARGEST[E4M3]
    stored = (weight / scale.view(-1, 1, 1, 1)).to(E4M3).contiguous()
    bias = torch.zeros_like(scale) if conv.bias is None else conv.bias.detach().float()
    steps = torch.ones(conv.in_channels, device=weight.device)
    return EightBit(stored, scale, steps, bias, flags)


def has_e4m3(device: torch.device) -> bool:
    """Whether the device has E4M3; a CPU multiplies the stored numbers in float32."""
    return device.type == "cpu" or capability_of(device) >= CAPABILITY_OF_E4M3


def fits_attention(stored: Tensor, heads: int) -> bool:
    """Whether attention among these tokens may run in 8 bits: on a CPU always, on a GPU if the
    kernel takes their size."""
    return not has_kernels(stored) or triton_module("attention").fits_attention(stored, heads)


def attend_in_e4m3(pair: Any, to_v: Any, stored: Tensor, heads: int, reader: Any) -> Tensor:
    """Attention among pixels in E4M3, whatever number the layers have; `pair` makes queries and
    keys, `reader` reads the result."""
    query, key = pair.products(stored, E4M3, 2)
    value = to_v.turned(stored, E4M3)
    if has_kernels(stored):
        return triton_module("attention").attention(query, key, value, heads, **reader.rounding)
    return reader.rounded(_attend(query.float(), key.float(), value.float(), heads) * reader.steps)


def _attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    query, key = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key))
    value = value.unflatten(0, (heads, -1)).permute(2, 0, 3, 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    shares = torch.exp(scores - scores.amax(-1, keepdim=True)) * SPREAD
    mixed = shares.to(E4M3).float() @ value / shares.sum(-1, keepdim=True)
    return mixed.transpose(1, 2).flatten(2)


def all_eight_bit(layers: Sequence[nn.Module]) -> bool:
    return all(isinstance(layer, EightBit) for layer in layers)


def _channels_last(x: Tensor) -> Tensor:
    """Lay a map's or tokens' channels next to each other, as the kernels read them."""
    layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return x.contiguous(memory_format=layout)


@cache
def _ones(device: torch.device) -> Tensor:
    """The inputs' scales, which the outputs' contain already; cached because CUDA graphs hold their
    address."""
    return torch.ones(MOST_TOKENS, 1, device=device)


@lru_cache(maxsize=8)
def has_scaled_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch's own 8-bit product takes a scale for each output channel here, into this
    type: tried once. The meta device counts as having it."""
    return runs_scaled_mm(device, dtype) if device.type == "cuda" else device.type == "meta"


def runs_scaled_mm(device: torch.device, dtype: torch.dtype) -> bool:
    rows, channels = PROBED
    x, weight = (torch.ones(n, channels, device=device).to(E4M3) for n in (rows, channels))
    scale, steps, bias = torch.ones(3, channels, device=device)
    layer = EightBit(weight, scale, steps, bias)
    try:
        layer._scaled_mm(x, dtype)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        log.warning("PyTorch's FP8 product does not run here, ours takes its place: %s", error)
        return False
    return True
