"""diffusers' VAE decoder rearranged for a GPU: channels-last from end to end, group norm, SiLU and
rounding in one pass. PyTorch's own group norm on a GPU wants each channel by itself, and each of
thirty would turn the map around twice.

The same weights and the same results; of what is doubled, less than half the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.pytorch.fast_unet import NormAct, apply, map_of, shortcut_of, tokens_of
from sdxl.networks.attention import attend
from sdxl.networks.vae import SIDES, summed

WIDEST_HEAD = 256
"""Beyond it PyTorch has no fused attention that Hopper's tensor cores were meant for."""
QUERIES = 4096
"""at a time, where scores lie in memory: as many results as fill a GPU, and 134 MB of scores to
16384 keys"""


class DecoderBlock(nn.Module):
    """A ResBlock without time."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1 = NormAct(block.norm1, has_silu=True)
        self.norm2 = NormAct(block.norm2, has_silu=True)
        self.conv1, self.conv2, self.shortcut = block.conv1, block.conv2, block.conv_shortcut

    def forward(self, x: Tensor, temb: None = None) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        past = shortcut_of(self.shortcut, x)
        hidden = apply(self.conv1, self.norm1(x, into=self.conv1), x)
        return apply(self.conv2, self.norm2(hidden, into=self.conv2), past, residual=past)


class DecoderAttention(nn.Module):
    """Among all pixels; between map and tokens nothing moves."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.norm = NormAct(attention.group_norm, has_silu=False)
        self.to_q, self.to_k, self.to_v = attention.to_q, attention.to_k, attention.to_v
        self.to_out, self.heads = attention.to_out[0], attention.heads

    def forward(self, x: Tensor, temb: None = None) -> Tensor:
        tokens = tokens_of(self.norm(x))
        query, key, value = self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)
        is_wide = self.heads == 1 and query.shape[-1] > WIDEST_HEAD
        found = (
            attend_by_products(query, key, value)
            if is_wide
            else attend(query, key, value, self.heads)
        )
        return x + map_of(self.to_out(found), x.shape[2:])


def attend_by_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of one head, [rows, tokens, width] each: two plain products and a softmax between them."""
    found, keys = torch.empty_like(query), key.transpose(1, 2)
    scale = query.shape[-1] ** -0.5
    # Scaled before they are rounded: a sum of so many products may be larger than halves hold.
    start = query.new_zeros(1)
    for first in range(0, query.shape[1], QUERIES):
        some = slice(first, first + QUERIES)
        scores = torch.baddbmm(start, query[:, some], keys, beta=0, alpha=scale)
        found[:, some] = torch.bmm(scores.softmax(-1), value)
    return found


class Quarters(nn.Module):
    """`networks.vae.Doubled` with its weights' sums made once: each of the four pixels that a pixel
    becomes is a 2×2 convolution of what was not doubled."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.bias = conv.bias
        self.sides = [(down, right) for down in (0, 1) for right in (0, 1)]
        self.convs = nn.ModuleList(_quarter(conv, *each) for each in self.sides)

    def forward(self, x: Tensor, output_size: None = None) -> Tensor:
        rows, _, height, width = x.shape
        dims = rows, len(self.bias), 2 * height, 2 * width
        out = torch.empty(dims, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        for (down, right), conv in zip(self.sides, self.convs, strict=True):
            # Padded on all sides: the first line and column are those of the other quarters.
            found = conv(x)[:, :, down : down + height, right : right + width]
            # The bias in the pass that is needed anyway.
            torch.add(found, self.bias[:, None, None], out=out[:, :, down::2, right::2])
        return out


def _quarter(conv: Any, down: int, right: int) -> nn.Conv2d:
    weight = conv.weight.detach()
    sums = summed(summed(weight.float(), 2, SIDES[down]), 3, SIDES[right]).to(weight)
    out, inside = weight.shape[:2]
    made = nn.Conv2d(inside, out, 2, padding=1, bias=False, device="meta")
    made.weight = nn.Parameter(sums.contiguous(memory_format=torch.channels_last), False)
    return made


def rearrange_decoder(decoder: Any) -> None:
    """In place."""
    middle = decoder.mid_block
    middle.attentions = nn.ModuleList(DecoderAttention(each) for each in middle.attentions)
    for block in decoder.up_blocks[:-1]:
        block.upsamplers = nn.ModuleList(Quarters(each.conv) for each in block.upsamplers)
    for block in (middle, *decoder.up_blocks):
        block.resnets = nn.ModuleList(DecoderBlock(resnet) for resnet in block.resnets)
    decoder.conv_norm_out = NormAct(decoder.conv_norm_out, has_silu=True)
    decoder.conv_act = nn.Identity()
