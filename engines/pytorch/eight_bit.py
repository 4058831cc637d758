"""8-bit layers of the torch backend, and attention between them: FP8 E4M3 or INT8 weights and
inputs, with the numbers that an export stores for its graphs.

A GPU multiplies in 8 bits. Other devices multiply the stored numbers in float32, the reference for
the GPU's results. int8 has no NaN, so a NaN sets the row's flag, which becomes a NaN in the
network's result.

Attention and the VAE's decoder need no calibration: E4M3 has the same relative precision from 2^-6
to 448, and queries, keys, values and normed maps are far inside this range.
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
from engines.low_rank import addition, factors_of, is_adapting, name_layer, names_of, plus_loras
from engines.pytorch.launches import LARGEST, Rounding, capability_of, has_kernels, triton_module
from sdxl.networks.vae import SIDES, summed

log = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
CAPABILITY_OF_E4M3 = 8, 9
TINY = torch.finfo(torch.float32).tiny
SPREAD = 256.0
"""A softmax's shares are multiplied by this in E4M3, whose smallest number is 2^-9."""
PROBED = 256, 1280
"""tokens and channels of a trial; a library may refuse sizes smaller than the UNet's"""
CONTROL_ROOM = 4.0
"""A ControlNet's inputs may be this many times as large as the UNet's."""
MAX_ROWS = 1024
"""rows of a call, more than fit in any memory"""
MOST_TOKENS = 2**19
"""tokens of a call: 32 rows at 2048×2048"""


class EightBit(nn.Module):
    """A linear layer, or a 3×3 convolution of stride 1.

    `weight` is [out, in] or [out, 3, 3, in]. An input is multiplied by its channel's value of
    `steps`, then rounded to 8 bits. `flags` are 0 or NaN, one for each row of a call; a network's
    layers share them."""

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
        # PyTorch's product takes a bias in 16 bits. Converting it at each call would be an extra
        # pass.
        for name, value in {**buffers, "half_bias": bias.half()}.items():
            self.register_buffer(name, value, persistent=False)

    @property
    def number(self) -> torch.dtype:
        return self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        added = addition(self, x) if self.weight.dim() > 2 else None
        return self.product(self.stored(x), x.dtype, added)

    def stored(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Round x, a map or tokens, or x + `added`, to steps of the 8-bit number."""
        if has_kernels(x):
            x = _channels_last(x)
            return triton_module("kernels").affine(x, added=added, rounding=self.rounding)
        total = x.float() if added is None else x.float() + added.float()
        steps = self.steps[:, None, None] if x.dim() == 4 else self.steps
        return self.rounded(total * steps)

    @property
    def rounding(self) -> Rounding:
        """How a kernel rounds its result for this layer."""
        is_bordered = self.weight.dim() > 2 and triton_module("product").fits_tma(self.weight)
        return Rounding(self.steps, self.number, self.flags, is_bordered)

    def rounded(self, steps: Tensor) -> Tensor:
        largest = LARGEST[self.number]
        if self.number == torch.int8:
            is_broken = steps.isnan()
            self.flags[: len(steps)].masked_fill_(is_broken.flatten(1).any(1), torch.nan)
            steps = steps.masked_fill(is_broken, 0).round()
        return steps.clamp(-largest, largest).to(self.number)

    def product(self, stored: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        """Multiply rounded input. A linear layer's product includes the call's LoRAs."""
        if not has_kernels(stored):
            return in_type(self._reference(stored, residual), dtype)
        if (parts := len(names_of(self))) > 1 and is_adapting(self):
            return torch.cat([*self.products(stored, dtype, parts)], -1)
        if residual is None and self.is_scaled_mm(stored, dtype):
            return self._scaled_mm(stored, dtype)
        residual = None if residual is None else _channels_last(residual)
        product, low_rank = triton_module("product").product, self.low_rank(stored)
        return product(stored, self.weight, self.scale, self.bias, dtype, residual, low_rank)

    def products(self, stored: Tensor, dtype: torch.dtype, parts: int) -> Sequence[Tensor]:
        """Return the products of the layers that this layer joins. They have the same size."""
        if not (has_kernels(stored) and is_adapting(self)):
            return self.product(stored, dtype).chunk(parts, -1)
        chunks = (each.chunk(parts) for each in (self.weight, self.scale, self.bias))
        product = triton_module("product").product
        return [
            product(stored, *layer, dtype, None, self._low_rank_of(name, stored))
            for name, layer in zip(names_of(self), zip(*chunks, strict=True), strict=True)
        ]

    def low_rank(self, stored: Tensor) -> Any:
        """Return the call's LoRAs of a linear layer, for Triton kernels; None if there are none."""
        has_low_rank = self.weight.dim() == 2 and is_adapting(self)
        return self._low_rank_of(names_of(self)[0], stored) if has_low_rank else None

    def _low_rank_of(self, name: str, stored: Tensor) -> Any:
        factors = factors_of(name)
        if factors is None:
            return None
        return triton_module("low_rank").low_rank(stored, self.flags, *factors)

    def is_scaled_mm(self, stored: Tensor, dtype: torch.dtype) -> bool:
        """Return whether PyTorch's product runs. It returns 16 or 32 bits and adds no LoRAs."""
        if self.weight.dim() != 2 or is_adapting(self) or torch.int8 in (self.number, dtype):
            return False
        return has_kernels(stored) and dtype != E4M3 and has_scaled_mm(stored.device, dtype)

    def transposed(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product of tokens as [out, rows, tokens]."""
        if not has_kernels(stored):
            return in_type(self._reference(stored, None), dtype).permute(2, 0, 1)
        product, low_rank = triton_module("product").transposed_product, self.low_rank(stored)
        return product(stored, self.weight, self.scale, self.bias, dtype, low_rank)

    def _scaled_mm(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        tokens, ones = stored.reshape(-1, stored.shape[-1]), _ones(stored.device)
        # Only in unusually large calls. A CUDA graph fills the new tensor at each replay.
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
    """A 3×3 convolution of a doubled map as four 2×2 convolutions of the undoubled map, one for
    each of the four pixels that a pixel becomes. It takes 4/9 of the arithmetic.

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
    """Return the quarters of a 3×3 convolution. Sums of its weights are rounded again."""
    weight = layer.weight.float()
    sums = [summed(summed(weight, 1, down), 2, right) for down in SIDES for right in SIDES]
    stored, factor = rounded_lines(torch.cat(sums).flatten(1), layer.number)
    stored = stored.view(4, *sums[0].shape)
    return EightBitQuarters(
        stored, layer.scale.repeat(4) * factor, layer.steps, layer.bias, layer.flags
    )


def rounded_lines(weight: Tensor, number: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round each line of [lines, in] with steps of its own; return the numbers and the steps."""
    largest = LARGEST[number]
    steps = (weight.abs().amax(1) / largest).clamp(min=TINY)
    weight = weight / steps[:, None]
    weight = weight.round() if number == torch.int8 else weight
    return weight.clamp(-largest, largest).to(number), steps


def in_type(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert like the Triton kernels: numbers too large for E4M3 become its largest number."""
    largest = LARGEST.get(dtype)
    return (value if largest is None else value.clamp(-largest, largest)).to(dtype)


class Flagged(nn.Module):
    """A network with int8 layers. Its first result is NaN in rows whose flag is set."""

    def __init__(self, network: nn.Module, flags: Tensor) -> None:
        super().__init__()
        self.network, self.flags = network, flags

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self.flags.zero_()
        first, *others = self.network(*inputs)
        flags = self.flags[: len(first)].to(first.dtype).view(-1, *[1] * (first.dim() - 1))
        return (first + flags, *others)


def steps_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the input steps of linear 8-bit layers by their names in a bank. LoRAs read the
    rounded input."""
    layers = (m for m in network.modules() if isinstance(m, EightBit) and m.weight.dim() == 2)
    return {name: layer.steps for layer in layers for name in names_of(layer)}


def flagged(network: nn.Module) -> nn.Module:
    """Wrap a network with int8 layers. FP8 has NaN and needs no flags."""
    layers = (m for m in network.modules() if isinstance(m, EightBit) and m.number == torch.int8)
    layer = next(layers, None)
    return network if layer is None else Flagged(network, layer.flags)


def quantise(unet: nn.Module, *files: Path) -> tuple[str, ...]:
    """Replace the layers for which the files have numbers by 8-bit layers; return their names."""
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return put_layers(unet, tensors)


def put_layers(unet: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    names = [key.removesuffix(INPUT_SCALE) for key in tensors if key.endswith(INPUT_SCALE)]
    flags = torch.zeros(MAX_ROWS, device=next(unet.parameters()).device)
    # Allocated now, because a tensor allocated during the capture of a CUDA graph is in the graph's
    # memory.
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
    """Replace a ControlNet's layers by E4M3 layers with the scales of the UNet's layers of the same
    names. A net's training starts with the UNet's weights, so its inputs are similar."""
    layers, tensors = dict(net.named_modules()), {}
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
                    tensors[name + SMOOTHING] = numbers.get_tensor(name + SMOOTHING)
                    smoothing = tensors[name + SMOOTHING].to(weight)
                    weight = weight / smoothing.view(-1, *[1] * (weight.dim() - 2))
                lines, tensors[name + SCALE] = rounded_lines(weight.flatten(1), E4M3)
                tensors[name + WEIGHT] = lines.view(weight.shape)
                room = CONTROL_ROOM * largest / LARGEST[E4M3]
                tensors[key] = room * numbers.get_tensor(key).float()
    put_layers(net, tensors)


def put_decoder_layers(decoder: Any) -> None:
    """Replace the convolutions in the ResBlocks of the VAE's decoder by E4M3 layers.

    They are most of the decoder's arithmetic, and read a norm's result. The sums between them stay
    in 16 bits."""
    flags = torch.zeros(MAX_ROWS, device=decoder.conv_in.weight.device)
    for block in (decoder.mid_block, *decoder.up_blocks):
        for resnet in block.resnets:
            resnet.conv1, resnet.conv2 = (
                _decoder_layer(conv, flags) for conv in (resnet.conv1, resnet.conv2)
            )


def _decoder_layer(conv: nn.Conv2d, flags: Tensor) -> EightBit:
    weight = conv.weight.detach().float().permute(0, 2, 3, 1)
    lines, scale = rounded_lines(weight.flatten(1), E4M3)
    bias = torch.zeros_like(scale) if conv.bias is None else conv.bias.detach().float()
    steps = torch.ones(conv.in_channels, device=weight.device)
    return EightBit(lines.view(weight.shape), scale, steps, bias, flags)


def has_e4m3(device: torch.device) -> bool:
    """Return whether the device has E4M3. A CPU multiplies the stored numbers in float32."""
    return device.type == "cpu" or capability_of(device) >= CAPABILITY_OF_E4M3


def fits_attention(stored: Tensor, heads: int) -> bool:
    """Return whether attention among these tokens may run in 8 bits: always on a CPU, on a GPU if
    the kernel supports their size."""
    return not has_kernels(stored) or triton_module("attention").fits_attention(stored, heads)


def attend_in_e4m3(pair: Any, to_v: Any, stored: Tensor, heads: int, reader: Any) -> Tensor:
    """Attend among pixels in E4M3, also between int8 layers. `pair` computes queries and keys;
    `reader` reads the result."""
    query, key = pair.products(stored, E4M3, 2)
    value = to_v.transposed(stored, E4M3)
    if has_kernels(stored):
        return triton_module("attention").attention(query, key, value, heads, reader.rounding)
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
    """Return a map or tokens with adjacent channels, as the kernels read them."""
    layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return x.contiguous(memory_format=layout)


@cache
def _ones(device: torch.device) -> Tensor:
    """Return the inputs' scales: ones, because the outputs' scales contain them. Cached, because
    CUDA graphs contain the address."""
    return torch.ones(MOST_TOKENS, 1, device=device)


@lru_cache(maxsize=8)
def has_scaled_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether PyTorch's 8-bit product supports a scale for each output channel and this
    result type here. A GPU tries once; the meta device counts as supporting it."""
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
