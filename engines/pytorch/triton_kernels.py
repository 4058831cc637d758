"""Triton kernels for channels-last maps and tokens that need one pass over memory where PyTorch
needs several.

A group norm reads twice: for the sums of each channel, then for one multiplication and addition a
value, with SiLU and rounding to 8 bits in the same pass. A NaN is preserved: in FP8 as a value, in
int8 as the row's flag. It knows no modules; launches.py decides when these run. With
TRITON_INTERPRET=1, set before the import, they run on a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.pytorch.launches import LARGEST, UNROUNDED, Rounding, launch
from engines.pytorch.slots import sides_of
from engines.pytorch.triton_group_norm import folded, summed
from engines.pytorch.triton_shared import (
    jit,
    row_sides,
    store_rounded,
    store_rounded_lines,
    store_steps,
)
from engines.pytorch.triton_tma_product import bordered_places, empty_bordered

PIXELS, CHANNELS, WARPS = 32, 128, 4
"""the size of a tile of a map, and its warps"""
NORM_WARPS = 1
"""warps of a token's layer norm; several would wait for each other twice"""


@jit
def _affine(
    x,
    added,
    factor,
    offset,
    steps,
    flags,
    sides,
    out,
    width,
    pixels,
    places,
    channels,
    largest,
    HAS_SILU: tl.constexpr,
    IS_BORDERED: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    # Only the first axis of a grid may have more than 65,535 programs.
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < channels
    target = pixel
    height, width = row_sides(sides, row, pixels // width, width)
    inside = pixel < (pixels if sides is None else height * width)
    if IS_BORDERED:
        # A column of zeros behind each line, and a line of zeros behind each picture.
        left, top = pixel % (width + 1), pixel // (width + 1)
        inside = (left < width) & (top < height)
        pixel = top * width + left
    place = (row * places + target)[:, None] * channels + channel[None, :]
    source = (row * pixels + pixel)[:, None] * channels + channel[None, :]
    mask = (target < places)[:, None] & here[None, :]
    value = tl.load(x + source, mask=inside[:, None] & here[None, :], other=0.0).to(tl.float32)
    if added is not None:
        more = tl.load(added + source, mask=inside[:, None] & here[None, :], other=0.0)
        value += more.to(tl.float32)
    if factor is not None:
        a = tl.load(factor + row * channels + channel, mask=here, other=0.0)
        b = tl.load(offset + row * channels + channel, mask=here, other=0.0)
        value = value * a[None, :] + b[None, :]
    if HAS_SILU:
        value = value * tl.sigmoid(value)
    if steps is not None:
        value = value * tl.load(steps + channel, mask=here, other=0.0)[None, :]
    if IS_BORDERED or sides is not None:
        value = tl.where(inside[:, None], value, 0.0)
    if steps is not None:
        line = flags + row + tl.zeros_like(pixel)
        store_rounded_lines(out + place, line, value, mask, largest)
    else:
        tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


@jit
def _gated(x, steps, flags, out, tokens, channels, largest, CHANNELS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    value = tl.load(x + token * 2 * channels + channel, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + (token * 2 + 1) * channels + channel, mask=mask, other=0.0).to(tl.float32)
    value = value * (0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)))
    place = out + token * channels + channel
    if steps is not None:
        value = value * tl.load(steps + channel, mask=mask, other=0.0)
        store_rounded(place, flags + token // tokens, value, mask, largest)
    else:
        tl.store(place, value.to(out.dtype.element_ty), mask=mask)


@jit
def _added(x, added, total, place, mask):
    value = tl.load(x + place, mask=mask, other=0.0)
    if added is not None:
        # Rounded like the stored sum: the norm reads the sum to which the next layer adds.
        value = value.to(tl.float32) + tl.load(added + place, mask=mask, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + place, value, mask=mask)
    return value.to(tl.float32)


@jit
def _store_normed(value, scale, weight, bias, steps, out, channel, mask, largest):
    value = value * scale * tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    if steps is not None:
        value = value * tl.load(steps + channel, mask=mask, other=0.0)
        store_steps(out + channel, value, mask, largest)
    else:
        tl.store(out + channel, value.to(out.dtype.element_ty), mask=mask)


@jit
def _add_norm(
    x,
    added,
    weight,
    bias,
    steps,
    flags,
    total,
    out,
    tokens,
    channels,
    eps,
    largest,
    CHANNELS: tl.constexpr,
    MORE: tl.constexpr,
):
    """Norm a token's first `CHANNELS` channels and `MORE` channels after them, both powers of
    two."""
    token = tl.program_id(0).to(tl.int64)
    channel, more = tl.arange(0, CHANNELS), CHANNELS + tl.arange(0, MORE)
    here, there = channel < channels, more < channels
    start = token * channels
    value = _added(x, added, total, start + channel, here)
    other = _added(x, added, total, start + more, there)
    mean = (tl.sum(value, 0) + tl.sum(other, 0)) / channels
    value = tl.where(here, value - mean, 0.0)
    other = tl.where(there, other - mean, 0.0)
    variance = (tl.sum(value * value, 0) + tl.sum(other * other, 0)) / channels
    scale = tl.rsqrt(variance + eps)
    out += start
    _store_normed(value, scale, weight, bias, steps, out, channel, here, largest)
    _store_normed(other, scale, weight, bias, steps, out, more, there, largest)
    if out.dtype.element_ty == tl.int8:
        # Any NaN makes the sum of all squares NaN.
        tl.store(flags + token // tokens, variance, mask=variance != variance)


def norm_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    *,
    has_silu: bool,
    shift: Tensor | None = None,
    sums: Tensor | None = None,
    rounding: Rounding = UNROUNDED,
) -> Tensor:
    """Norm x + `shift`, x [rows, channels, h, w], channels last, and `shift` [rows, channels].
    `sums` are the result of `summed`, if known."""
    sums = summed(x)[1] if sums is None else sums
    pixels, sides = x.shape[2] * x.shape[3], sides_of(x)
    factor, offset = folded(sums, weight, bias, shift, pixels, groups, eps, sides)
    return affine(x, factor, offset, has_silu=has_silu, rounding=rounding)


def affine(
    x: Tensor,
    factor: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    added: Tensor | None = None,
    has_silu: bool = False,
    rounding: Rounding = UNROUNDED,
) -> Tensor:
    """Compute (x + added) * factor + offset by row and channel, apply SiLU, and round. x is a
    channels-last map or tokens."""
    rows = x.shape[0]
    channels = x.shape[1] if x.dim() == 4 else x.shape[-1]
    places = pixels = x.numel() // (rows * channels)
    sides = sides_of(x) if x.dim() == 4 else None
    if rounding.is_bordered:
        out = empty_bordered(x, rounding.number or x.dtype)
        places = bordered_places(x)
    else:
        out = torch.empty_like(x, dtype=rounding.number)
    tensors = (x, added, factor, offset, rounding.steps, rounding.flags, sides, out)
    sizes = (x.shape[-1], pixels, places, channels, LARGEST.get(out.dtype, 0.0))
    launch(
        _affine,
        (triton.cdiv(places, PIXELS), rows, triton.cdiv(channels, CHANNELS)),
        *tensors,
        *sizes,
        HAS_SILU=has_silu,
        IS_BORDERED=rounding.is_bordered,
        PIXELS=PIXELS,
        CHANNELS=CHANNELS,
        num_warps=WARPS,
    )
    return out


def add_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    rounding: Rounding = UNROUNDED,
) -> tuple[Tensor, Tensor]:
    """Add `added` to tokens [rows, tokens, channels]; return the sum and its layer norm."""
    channels = x.shape[-1]
    first = 1 << (channels.bit_length() - 1)
    total = x if added is None else torch.empty_like(x)
    out = torch.empty_like(x, dtype=rounding.number)
    tensors = (x, added, weight, bias, rounding.steps, rounding.flags, total, out)
    sizes = (x.shape[1], channels, eps, LARGEST.get(out.dtype, 0.0))
    launch(
        _add_norm,
        (x.numel() // channels,),
        *tensors,
        *sizes,
        CHANNELS=first,
        MORE=triton.next_power_of_2(max(channels - first, 1)),
        num_warps=NORM_WARPS,
    )
    return total, out


def gated(x: Tensor, rounding: Rounding = UNROUNDED) -> Tensor:
    """Multiply the first half of the last dimension by the GELU of the second."""
    channels = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], channels), dtype=rounding.number)
    count, size = out.numel() // channels, min(1024, triton.next_power_of_2(channels))
    tensors = (x, rounding.steps, rounding.flags, out)
    sizes = (count // x.shape[0], channels, LARGEST.get(out.dtype, 0.0))
    launch(_gated, (count, triton.cdiv(channels, size)), *tensors, *sizes, CHANNELS=size)
    return out
