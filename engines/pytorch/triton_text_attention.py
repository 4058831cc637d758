"""Attention of pixels to a prompt in 16 bits. The result is rounded to 8 bits for the next layer.

A prompt has few keys, 77 or a small multiple. A program keeps its queries and reads the keys in
blocks, the last keys in smaller blocks. It knows no modules; with TRITON_INTERPRET=1, set before
the import, it runs on a CPU.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.pytorch.launches import LARGEST, launch
from engines.pytorch.triton_shared import IS_INTERPRETED, jit, store_rounded_lines

M, N = (32, 32) if IS_INTERPRETED else (64, 64)
"""queries of a program, and keys at a time"""
TAIL = 16
"""keys at a time behind the whole blocks: the fewest that tensor cores support"""
WARPS, STAGES = 4, 2


@jit
def _add_keys(
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
    """Add these keys to the highest score, the sum of shares and the sum of values."""
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
        highest, total, mixed = _add_keys(
            q, highest, total, mixed, key, value, begin, keys, channels, scale, HEAD, N
        )
    for begin in tl.range(whole, keys, TAIL, num_stages=1):
        highest, total, mixed = _add_keys(
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    *,
    steps: Tensor,
    number: torch.dtype,
    flags: Tensor,
) -> Tensor:
    """Attend. All tensors are [rows, tokens, channels]. The result is rounded to `number` with
    `steps` for each unit."""
    rows, tokens, channels = query.shape
    keys, head = key.shape[1], channels // heads
    out = torch.empty_like(query, dtype=number)
    launch(
        _text_attention,
        (triton.cdiv(tokens, M), heads, rows),
        query,
        key.contiguous(),
        value.contiguous(),
        steps,
        flags,
        out,
        tokens,
        keys,
        channels,
        math.log2(math.e) / math.sqrt(head),
        LARGEST[number],
        HEAD=head,
        M=M,
        N=N,
        TAIL=TAIL,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out
