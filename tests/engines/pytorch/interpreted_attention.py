"""Attention in our Triton kernels against PyTorch in float64: checks that interpreted_kernels.py
runs under Triton's interpreter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engines.pytorch.launches import Rounding
from engines.pytorch.triton_attention import attention, text_attention
from engines.pytorch.triton_product import transposed_product
from engines.pytorch.triton_tma_product import ALIGNED
from tests.engines.pytorch.kernel_checks import (
    INFINITY,
    NAN,
    ROWS,
    attended,
    broken_rows,
    check,
    differing,
    flags_wrong,
    rounded,
    rounding_wrong,
    wrong_by,
)


def in_int8(channels: int, steps: float) -> Any:
    return Rounding(torch.full((channels,), steps), torch.int8, torch.zeros(ROWS))


@check
def attentions() -> Iterator[str]:
    """In floats, exact but for the rounding of the result; with lines longer than the part that is
    read, and tokens that fill no tile."""
    for head, tokens in itertools.product((64, 128), (28, 64, 84)):
        channels = 2 * head
        query, key = torch.randn(ROWS, tokens, 2 * channels).chunk(2, dim=-1)
        value, steps = torch.randn(channels, ROWS, tokens), torch.rand(channels) * 200 + 100
        expected = attended(query, key, value, 2)
        run = partial(attention, query, key, value, 2)
        yield from rounding_wrong(run, steps, expected * steps, (head, tokens), set())


@check
def attention_to_nan_and_infinity() -> Iterator[str]:
    """A NaN among the keys or values of a row's head shows in the whole head; a NaN in a query
    shows in its token. Other rows stay whole, although their tokens follow in memory."""
    channels, tokens, heads = 128, 44, 2
    for which, bad in itertools.product(range(3), (NAN, INFINITY, -INFINITY)):
        query, key = torch.randn(2, ROWS, tokens, channels)
        value = torch.randn(channels, ROWS, tokens)
        (query[1], key[1], value[:, 1].T)[which][40, 70] = bad
        expected, rounding = attended(query, key, value, heads), in_int8(channels, 100.0)
        found = attention(query, key, value, heads, rounding)
        wanted = rounded(expected * 100, torch.int8)
        yield from differing(found, wanted, (which, bad))
        broken = broken_rows(expected)
        if not broken <= {1}:
            yield f"{which}, {bad}: the reference breaks the rows {broken}"
        yield from flags_wrong(rounding.flags, broken, torch.int8, (which, bad))


@check
def attentions_in_e4m3() -> Iterator[str]:
    """The shares lose only E4M3's rounding; `differing` describes the interpreter's E4M3."""
    channels, tokens = 128, 112
    query, key = (torch.randn(2, ROWS, tokens, channels) * 2).to(torch.float8_e4m3fn)
    value = torch.randn(channels, ROWS, tokens).to(torch.float8_e4m3fn)
    found = attention(query, key, value, 2, in_int8(channels, 50.0))
    yield from wrong_by(found.float() / 50, attended(query, key, value, 2), 0.04, "E4M3")


@check
def attentions_of_any_number_of_tokens() -> Iterator[str]:
    """Values from a transposed product, whose rows are padded. A NaN stays in its row."""
    channels, rows = 64, 2
    weight = torch.eye(channels).to(torch.float8_e4m3fn)
    scale, bias = torch.ones(channels), torch.zeros(channels)
    for tokens in (31, 40, 284):
        query, key, value = torch.randn(3, rows, tokens, channels).to(torch.float8_e4m3fn)
        turned = transposed_product(value, weight, scale, bias, torch.float8_e4m3fn)
        if turned.stride(1) % ALIGNED or turned.shape[1:] != (rows, tokens):
            yield f"{tokens}: shape {tuple(turned.shape)}, strides {turned.stride()}"
        values = turned.float()
        if not torch.equal(values, value.float().permute(2, 0, 1)):
            yield f"{tokens}: the turned product is not the product"
        # The interpreter's E4M3 has no NaN: see `differing`.
        padded = torch.empty(channels, rows, turned.stride(1)).fill_(NAN)[:, :, :tokens]
        padded.copy_(values)[:, 1] = NAN
        # A mean of more values is smaller.
        steps = 10 * tokens**0.5
        rounding = in_int8(channels, steps)
        found = attention(query, key, padded, 1, rounding)
        expected = attended(query, key, values, 1)
        yield from wrong_by(found[0].float() / steps, expected[0], 0.04, tokens)
        yield from flags_wrong(rounding.flags, {1}, torch.int8, tokens)


def attended_text(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    return attended(query, key, value.permute(2, 0, 1), heads)


@check
def attentions_to_a_prompt() -> Iterator[str]:
    """Prompts that fill a part of a block of keys, one block, or several; in halves and floats."""
    for head, keys, tokens in itertools.product((16, 64), (5, 32, 77), (28, 64)):
        channels, steps = 2 * head, torch.rand(2 * head) * 200 + 100
        query, (key, value) = (
            torch.randn(ROWS, tokens, channels),
            torch.randn(2, ROWS, keys, channels),
        )
        expected = attended_text(query, key, value, 2)
        run = partial(text_attention, query, key, value, 2)
        yield from rounding_wrong(run, steps, expected * steps, (head, keys, tokens), set())
        halves = query.half(), key.half(), value.half()
        found = text_attention(*halves, 2, in_int8(channels, 50.0))
        wanted = attended_text(*halves, 2)
        most = float((found.double() - (wanted * 50).clamp(-127, 127)).abs().max())
        if most > 0.6:
            yield f"{head, keys, tokens}, halves: a value is off by {most:.2f} steps, at most 0.6"


@check
def attentions_to_a_prompt_with_nan_and_infinity() -> Iterator[str]:
    """A NaN shows in its row and in no other, whatever is next to it in memory."""
    channels, heads = 32, 2
    for which, bad, keys in itertools.product(range(3), (NAN, INFINITY, -INFINITY), (20, 45)):
        query, (key, value) = (
            torch.randn(ROWS, 40, channels),
            torch.randn(2, ROWS, keys, channels),
        )
        (query, key, value)[which][1, keys - 1 if which else 39, 18] = bad
        expected, rounding = attended_text(query, key, value, heads), in_int8(channels, 100.0)
        found = text_attention(query, key, value, heads, rounding)
        what = (which, bad, keys)
        yield from differing(found, rounded(expected * 100, torch.int8), what)
        broken = broken_rows(expected)
        yield from flags_wrong(rounding.flags, broken, torch.int8, what)
