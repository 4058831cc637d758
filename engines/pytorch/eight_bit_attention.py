"""Attention among pixels in 8 bits: query, key and value in E4M3 whatever number the layers around
have, and the result as the layer that reads it wants it.

There are no scales to calibrate: from 2^-6 to 448 E4M3 keeps the same share of a value whatever its
size, and queries, keys and values lie far inside. Elsewhere than on a GPU the same numbers are
multiplied in float32, as in eight_bit.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engines.pytorch.eight_bit import EightBit
from engines.pytorch.kernel_switch import attentions, has_kernels

NUMBER = torch.float8_e4m3fn
SPREAD = 256.0
"""E4M3 holds down to 2^-9; a softmax's shares go to it as so many times themselves."""


def suits(layers: Sequence[nn.Module], reader: nn.Module) -> bool:
    """Whether attention may run so between these projections and the layer that reads it."""
    return all(isinstance(layer, EightBit) for layer in (*layers, reader))


def fits(stored: Tensor, heads: int) -> bool:
    """Tokens of any size on a CPU; on a GPU those that the kernel takes."""
    if not has_kernels(stored):
        return True
    found: bool = attentions().fits_attention(stored, heads)
    return found


def attended(pair: Any, to_v: Any, stored: Tensor, heads: int, reader: Any) -> Tensor:
    """`pair` makes queries and keys of what is stored; the result is as `reader` stores it."""
    query, key = pair.product(stored, NUMBER).chunk(2, dim=-1)
    value = to_v.turned(stored, NUMBER)
    if has_kernels(stored):
        found: Tensor = attentions().attention(query, key, value, heads, **reader.rounding)
        return found
    found = _reference(query.float(), key.float(), value.float(), heads)
    rounded: Tensor = reader.rounded(found * reader.steps)
    return rounded


def _reference(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    query, key = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key))
    value = value.unflatten(0, (heads, -1)).permute(2, 0, 3, 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    shares = torch.exp(scores - scores.amax(-1, keepdim=True)) * SPREAD
    found = shares.to(NUMBER).float() @ value / shares.sum(-1, keepdim=True)
    return found.transpose(1, 2).flatten(2)
