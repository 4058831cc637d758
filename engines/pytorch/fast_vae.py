"""diffusers' VAE decoder rearranged for a GPU. All maps are channels-last; group norm, SiLU and
rounding are one pass. PyTorch's group norm on a GPU needs channels first, so each of thirty norms
would transpose the map twice.

The weights and results are the same. Doubled maps take less than half of the arithmetic.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engines.pytorch.fast_unet import NormAct, ResBlock, map_of, tokens_of
from sdxl.networks.attention import attend
from sdxl.networks.vae import SIDES, summed

WIDEST_HEAD = 256
"""the widest head for which PyTorch has fused attention for Hopper's tensor cores"""
QUERIES = 4096
"""queries at a time, if scores are in memory: they fill a GPU, and take 134 MB for 16384 keys"""


class DecoderAttention(nn.Module):
    """Attention among all pixels."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.norm = NormAct(attention.group_norm, has_silu=False)
        self.to_q, self.to_k, self.to_v = attention.to_q, attention.to_k, attention.to_v
        self.to_out, self.heads = attention.to_out[0], attention.heads

    def forward(self, x: Tensor, temb: None = None) -> Tensor:
        tokens = tokens_of(self.norm(x))
        query, key, value = self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)
        is_wide = self.heads == 1 and query.shape[-1] > WIDEST_HEAD
        attend_to = attend_by_products if is_wide else partial(attend, heads=self.heads)
        return x + map_of(self.to_out(attend_to(query, key, value)), x.shape[2:])


def attend_by_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with one head by two products and a softmax. All tensors are [rows, tokens, width]."""
    mixed, keys = torch.empty_like(query), key.transpose(1, 2)
    scale = query.shape[-1] ** -0.5
    # Scaled before rounding, because a sum of so many products may overflow 16 bits.
    start = query.new_zeros(1)
    for first in range(0, query.shape[1], QUERIES):
        block = slice(first, first + QUERIES)
        scores = torch.baddbmm(start, query[:, block], keys, beta=0, alpha=scale)
        mixed[:, block] = torch.bmm(scores.softmax(-1), value)
    return mixed


class Quarters(nn.Module):
    """`networks.vae.Doubled`, with sums of weights computed once. Each of the four pixels that a
    pixel becomes is a 2×2 convolution of the map before doubling."""

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
            # The convolution pads all four sides; each quarter needs two of them.
            quarter = conv(x)[:, :, down : down + height, right : right + width]
            # Adds the bias while copying.
            torch.add(quarter, self.bias[:, None, None], out=out[:, :, down::2, right::2])
        return out


def _quarter(conv: Any, down: int, right: int) -> nn.Conv2d:
    weight = conv.weight.detach()
    sums = summed(summed(weight.float(), 2, SIDES[down]), 3, SIDES[right]).to(weight)
    out_channels, in_channels = weight.shape[:2]
    quarter = nn.Conv2d(in_channels, out_channels, 2, padding=1, bias=False, device="meta")
    quarter.weight = nn.Parameter(sums.contiguous(memory_format=torch.channels_last), False)
    return quarter


def rearrange_decoder(decoder: Any) -> None:
    """Rearrange a decoder in place."""
    middle = decoder.mid_block
    middle.attentions = nn.ModuleList(DecoderAttention(each) for each in middle.attentions)
    for block in decoder.up_blocks[:-1]:
        block.upsamplers = nn.ModuleList(Quarters(each.conv) for each in block.upsamplers)
    for block in (middle, *decoder.up_blocks):
        block.resnets = nn.ModuleList(ResBlock(resnet) for resnet in block.resnets)
    decoder.conv_norm_out = NormAct(decoder.conv_norm_out, has_silu=True)
    decoder.conv_act = nn.Identity()
