"""LoRAs in 8-bit products, in Triton. One kernel computes the ranks of every token; functions
compute the sums with which a product begins.

A token's ranks are its products with the `down` factors of its row's pages, times their scales. It
knows no modules; with TRITON_INTERPRET=1, set before the import, it runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.pytorch.launches import launch
from engines.pytorch.triton_shared import jit
from sdxl.specs import PAGE_RANK

AT_ONCE = tl.constexpr(32)
"""ranks at a time"""
PAGE = tl.constexpr(PAGE_RANK)
LEAST_SCALE = tl.constexpr(1e-30)
"""avoids a division by zero for channels whose weights are zero"""
M, K = 128, 64


@dataclass(frozen=True)
class TokenRanks:
    """LoRAs of a layer's product of tokens."""

    ranks: Tensor
    """[rows, tokens, pages × rank]"""
    up: Tensor
    """the layer's factors in the bank, [pages of the bank, rank, out]"""
    pages: Tensor
    """[rows, pages]"""


def arguments_of(low_rank: TokenRanks | None) -> tuple[Any, ...]:
    """Return a product kernel's arguments."""
    if low_rank is None:
        return (None,) * 5
    ranks, pages = low_rank.ranks, low_rank.pages
    return ranks, low_rank.up, pages, pages.shape[1], ranks.shape[1]


@jit
def _ranks(
    x,
    down,
    pages,
    scales,
    flags,
    out,
    page_count,
    tokens,
    channels,
    IS_WHOLE: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(1)
    token = tl.program_id(0) * M + tl.arange(0, M)
    source = (row * tokens + token).to(tl.int64)
    for first in range(0, page_count * PAGE, AT_ONCE):
        rank = first + tl.arange(0, AT_ONCE)
        is_used = rank < page_count * PAGE
        page = tl.load(pages + row * page_count + rank // PAGE, mask=is_used, other=0)
        line = (page.to(tl.int64) * PAGE + rank % PAGE) * channels
        total = tl.zeros([M, AT_ONCE], tl.float32)
        for start in range(0, channels, K):
            channel = start + tl.arange(0, K)
            inside = channel < channels
            input_mask = (token < tokens)[:, None] & inside[None, :]
            a = tl.load(
                x + (source * channels)[:, None] + channel[None, :], mask=input_mask, other=0.0
            )
            weight_mask = is_used[None, :] & inside[:, None]
            b = tl.load(down + line[None, :] + channel[:, None], mask=weight_mask, other=0.0)
            total = tl.dot(a.to(b.dtype), b, total)
        index = row * page_count * PAGE + rank
        total *= tl.load(scales + index, mask=is_used, other=0.0).to(tl.float32)[None, :]
        value = total.to(out.dtype.element_ty)
        place = (source * (page_count * PAGE))[:, None] + rank[None, :]
        there = (token < tokens)[:, None] & is_used[None, :]
        tl.store(out + place, value, mask=there)
        if IS_WHOLE:
            # Sums of whole numbers cannot hold a NaN or an infinity.
            broken = there & (value - value != 0.0)
            tl.store(flags + row + tl.zeros_like(place), float("nan"), mask=broken)


@jit
def rows_of_tile(down, M: tl.constexpr, count, tokens):
    """Return the first and the last row whose tokens a tile has."""
    return down // tokens, (tl.minimum(down + M, count) - 1) // tokens


@jit
def lora_sums(low_rank, scale, token, line, rows, count, lines, IS_WHOLE: tl.constexpr):
    """Return the sums [tokens, lines] with which a product begins, in units of `scale`. A tile may
    have tokens of several rows, from the first to the last of `rows`."""
    ranks, up, pages, page_count, tokens = low_rank
    first_row, last_row = rows
    is_line = line < lines
    total = tl.zeros([token.shape[0], line.shape[0]], tl.float32)
    for row in range(first_row, last_row + 1):
        is_own = (token < count) & (token >= row * tokens) & (token < (row + 1) * tokens)
        for first in range(0, page_count * PAGE, AT_ONCE):
            rank = first + tl.arange(0, AT_ONCE)
            is_used = rank < page_count * PAGE
            page = tl.load(pages + row * page_count + rank // PAGE, mask=is_used, other=0)
            place = (token.to(tl.int64) * (page_count * PAGE))[:, None] + rank[None, :]
            a = tl.load(ranks + place, mask=is_own[:, None] & is_used[None, :], other=0.0)
            place = ((page * PAGE + rank % PAGE) * lines)[:, None] + line[None, :]
            b = tl.load(up + place, mask=is_used[:, None] & is_line[None, :], other=0.0)
            total = tl.dot(a, b, total)
    unit = tl.load(scale + line, mask=is_line, other=1.0)
    return _in_units(total, unit[None, :], IS_WHOLE)


@jit
def transposed_lora_sums(low_rank, scale, line, token, row, count, IS_WHOLE: tl.constexpr):
    """Return the sums as [lines, tokens], for tokens of one row."""
    ranks, up, pages, page_count, tokens = low_rank
    is_line, is_token = line < count, token < tokens
    total = tl.zeros([line.shape[0], token.shape[0]], tl.float32)
    for first in range(0, page_count * PAGE, AT_ONCE):
        rank = first + tl.arange(0, AT_ONCE)
        is_used = rank < page_count * PAGE
        page = tl.load(pages + row * page_count + rank // PAGE, mask=is_used, other=0)
        place = ((page * PAGE + rank % PAGE) * count)[None, :] + line[:, None]
        a = tl.load(up + place, mask=is_used[None, :] & is_line[:, None], other=0.0)
        source = (row * tokens + token).to(tl.int64) * (page_count * PAGE)
        b = tl.load(
            ranks + source[None, :] + rank[:, None],
            mask=is_used[:, None] & is_token[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total)
    unit = tl.load(scale + line, mask=is_line, other=1.0)
    return _in_units(total, unit[:, None], IS_WHOLE)


@jit
def _in_units(total, unit, IS_WHOLE: tl.constexpr):
    total = total / (unit + LEAST_SCALE)
    if IS_WHOLE:
        total = tl.floor(total + 0.5).to(tl.int32)
    return total


def low_rank(
    x: Tensor, flags: Tensor, down: Tensor, up: Tensor, pages: Tensor, scales: Tensor
) -> TokenRanks:
    """Multiply 8-bit tokens [rows, tokens, channels] by their rows' `down`. `scales` are
    [rows, pages × rank]. For int8 tokens, a row's flag becomes NaN if a rank is not finite."""
    rows, tokens, channels = x.shape
    ranks = torch.empty((rows, tokens, scales.shape[1]), dtype=down.dtype, device=x.device)
    tensors = (x, down, pages, scales, flags, ranks)
    sizes = (pages.shape[1], tokens, channels)
    launch(
        _ranks,
        (triton.cdiv(tokens, M), rows),
        *tensors,
        *sizes,
        IS_WHOLE=x.dtype == torch.int8,
        M=M,
        K=K,
        num_warps=4,
        num_stages=3,
    )
    return TokenRanks(ranks, up, pages)
