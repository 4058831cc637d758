"""Attention whose result is rounded to 8 bits for the next layer.

Attention among pixels is in FP8, for GPUs with a tensor memory accelerator (TMA), Hopper and later:
descriptors read query, key and value in E4M3. A value's tokens are adjacent in memory, because
tensor cores need this of an 8-bit second factor.

Attention to a prompt is in 16 bits. A prompt has few keys, 77 or a small multiple: a program keeps
its queries and reads the keys in blocks, the last keys in smaller blocks. It knows no modules; with
TRITON_INTERPRET=1, set before the import, it runs on a CPU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engines.pytorch.launches import LARGEST, Rounding, launch
from engines.pytorch.slots import sides_of
from engines.pytorch.triton_shared import (
    IS_INTERPRETED,
    jit,
    row_sides,
    store_rounded,
    store_rounded_lines,
)
from engines.pytorch.triton_tma_product import ALIGNED, has_tma

SPREAD = tl.constexpr(8.0)
"""A softmax's shares are multiplied by 2^8 before they are rounded to E4M3, whose smallest number
is 2^-9."""
M, N = (32, 32) if IS_INTERPRETED else (128, 128)
"""queries of a program, and keys at a time"""
WARPS, STAGES = 8, 3
REGISTERS = 128
"""registers of a thread, so that a multiprocessor runs two programs. The compiler would choose 148
for an FP8 result; then it runs one and takes 1.38 times as long (docs/log.md)."""
TEXT_M, TEXT_N = (32, 32) if IS_INTERPRETED else (64, 64)
TAIL = 16
"""keys at a time behind the whole blocks: the fewest that tensor cores support"""
TEXT_WARPS, TEXT_STAGES = 4, 2


@jit
def _add_keys(
    q,
    highest,
    total,
    mixed,
    key,
    value,
    row,
    first,
    begin,
    keys,
    scale,
    IS_LAST: tl.constexpr,
    HEAD: tl.constexpr,
    N: tl.constexpr,
):
    """Add these keys to the highest score, the sum of shares and the sum of values."""
    k = key.load([row, begin, first]).reshape(N, HEAD)
    scores = tl.dot(q, k.T)
    if IS_LAST:
        is_key = begin + tl.arange(0, N) < keys
        scores = tl.where(is_key[None, :], scores, float("-inf"))
    # The maximum may hide a NaN, but the shares do not.
    higher = tl.maximum(highest, tl.max(scores, 1) * scale)
    shares = tl.exp2(scores * scale - (higher - SPREAD)[:, None])
    decay = tl.exp2(highest - higher)
    total = total * decay + tl.sum(shares, 1)
    v = value.load([row, first, begin]).reshape(HEAD, N)
    mixed = tl.dot(shares.to(v.dtype), v.T, mixed * decay[:, None])
    return higher, total, mixed


@jit
def _attention(
    steps,
    query,
    key,
    value,
    flags,
    sides,
    out,
    tokens,
    channels,
    scale,
    largest,
    HEAD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    start, first, row = tl.program_id(0) * M, tl.program_id(1) * HEAD, tl.program_id(2)
    q = query.load([row, start, first]).reshape(M, HEAD)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, HEAD], tl.float32)
    # In slots, pads are no keys. As queries they give numbers that nothing reads.
    height, width = row_sides(sides, row, 1, tokens)
    keys = height * width
    whole = keys // N * N
    # Descriptors read zeros beyond the last key, and only this block masks their scores. It comes
    # first, because sums of zero need no registers.
    if whole < keys:
        highest, total, mixed = _add_keys(
            q, highest, total, mixed, key, value, row, first, whole, keys, scale, True, HEAD, N
        )
    for begin in range(0, whole, N):
        highest, total, mixed = _add_keys(
            q, highest, total, mixed, key, value, row, first, begin, keys, scale, False, HEAD, N
        )
    token, channel = start + tl.arange(0, M), first + tl.arange(0, HEAD)
    mixed = mixed / total[:, None] * tl.load(steps + channel)[None, :]
    place = (row.to(tl.int64) * tokens + token)[:, None] * channels + channel[None, :]
    mask = (token < tokens)[:, None] & (channel < channels)[None, :]
    store_rounded(out + place, flags + row, mixed, mask, largest)


def fits_attention(x: Tensor, heads: int) -> bool:
    """Return whether the channels are a multiple of 16 bytes, which descriptors need, and a head's
    width is one of the kernel's."""
    head = x.shape[-1] // heads
    return has_tma(x.device) and x.shape[-1] % ALIGNED == 0 and head in (64, 128)


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int, rounding: Rounding) -> Tensor:
    """Attend and round. Query and key are [rows, tokens, channels] and may be parts of wider lines.
    Value is [channels, rows, tokens]; its rows are multiples of 16 bytes apart."""
    rows, tokens, channels = query.shape
    head = channels // heads
    out = torch.empty((rows, tokens, channels), dtype=rounding.number, device=query.device)
    blocks = ((query, [1, M, head]), (key, [1, N, head]), (value.transpose(0, 1), [1, head, N]))
    factors = [TensorDescriptor.from_tensor(*each) for each in blocks]
    tensors = (rounding.steps, *factors, rounding.flags, sides_of(query), out)
    sizes = (tokens, channels, math.log2(math.e) / math.sqrt(head), LARGEST[out.dtype])
    launch(
        _attention,
        (triton.cdiv(tokens, M), heads, rows),
        *tensors,
        *sizes,
        HEAD=head,
        M=M,
        N=N,
        num_warps=WARPS,
        num_stages=STAGES,
        maxnreg=REGISTERS,
    )
    return out


@jit
def _add_text_keys(
    q,
    highest,
    total,
    mixed,
    key,
    value,
    begin,
    keys,
    channels,
    scale,
    HEAD: tl.constexpr,
    N: tl.constexpr,
):
    """As `_add_keys`, from pointers."""
    index, channel = begin + tl.arange(0, N), tl.arange(0, HEAD)
    is_key = index < keys
    place = index[:, None] * channels + channel[None, :]
    k = tl.load(key + place, mask=is_key[:, None], other=0.0)
    v = tl.load(value + place, mask=is_key[:, None], other=0.0)
    scores = tl.where(is_key[None, :], tl.dot(q, k.T) * scale, float("-inf"))
    # The maximum may hide a NaN, but the shares do not.
    higher = tl.maximum(highest, tl.max(scores, 1))
    shares = tl.exp2(scores - higher[:, None])
    decay = tl.exp2(highest - higher)
    mixed = tl.dot(shares.to(v.dtype), v, mixed * decay[:, None])
    return higher, total * decay + tl.sum(shares, 1), mixed


@jit
def _text_attention(
    query,
    key,
    value,
    steps,
    flags,
    out,
    tokens,
    keys,
    channels,
    scale,
    largest,
    HEAD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TAIL: tl.constexpr,
):
    token = tl.program_id(0) * M + tl.arange(0, M)
    first, row = tl.program_id(1) * HEAD, tl.program_id(2).to(tl.int64)
    channel = first + tl.arange(0, HEAD)
    place = (row * tokens + token)[:, None] * channels + channel[None, :]
    mask = (token < tokens)[:, None] & (channel < channels)[None, :]
    q = tl.load(query + place, mask=mask, other=0.0)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, HEAD], tl.float32)
    key += row * keys * channels + first
    value += row * keys * channels + first
    whole = keys // N * N
    for begin in range(0, whole, N):
        highest, total, mixed = _add_text_keys(
            q, highest, total, mixed, key, value, begin, keys, channels, scale, HEAD, N
        )
    for begin in tl.range(whole, keys, TAIL, num_stages=1):
        highest, total, mixed = _add_text_keys(
            q, highest, total, mixed, key, value, begin, keys, channels, scale, HEAD, TAIL
        )
    mixed = mixed / total[:, None] * tl.load(steps + channel)[None, :]
    store_rounded_lines(out + place, flags + row + tl.zeros_like(token), mixed, mask, largest)


def fits_text_attention(query: Tensor, heads: int) -> bool:
    """Return whether the kernel supports heads of this width in 16 bits. The interpreter supports
    float32 too."""
    is_half = query.element_size() == 2 or IS_INTERPRETED
    return is_half and query.shape[-1] // heads in (16, 32, 64, 128)


def text_attention(
    query: Tensor, key: Tensor, value: Tensor, heads: int, rounding: Rounding
) -> Tensor:
    """Attend and round. All tensors are [rows, tokens, channels]."""
    rows, tokens, channels = query.shape
    keys, head = key.shape[1], channels // heads
    out = torch.empty_like(query, dtype=rounding.number)
    tensors = (query, key.contiguous(), value.contiguous(), rounding.steps, rounding.flags, out)
    sizes = (tokens, keys, channels, math.log2(math.e) / math.sqrt(head), LARGEST[out.dtype])
    launch(
        _text_attention,
        (triton.cdiv(tokens, TEXT_M), heads, rows),
        *tensors,
        *sizes,
        HEAD=head,
        M=TEXT_M,
        N=TEXT_N,
        TAIL=TAIL,
        num_warps=TEXT_WARPS,
        num_stages=TEXT_STAGES,
    )
    return out
