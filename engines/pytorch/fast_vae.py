"""diffusers' VAE decoder rearranged for a GPU: channels-last from end to end, group norm and SiLU
in one pass. PyTorch's own group norm on a GPU wants each channel by itself, and each of thirty
would turn the map around twice.

The same weights and the same arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engines.pytorch.fast_unet import NormAct
from sdxl.networks.attention import attend


class DecoderBlock(nn.Module):
    """A ResBlock without time."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1 = NormAct(block.norm1, has_silu=True)
        self.norm2 = NormAct(block.norm2, has_silu=True)
        self.conv1, self.conv2, self.shortcut = block.conv1, block.conv2, block.conv_shortcut

    def forward(self, x: Tensor, temb: None = None) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        past = x if self.shortcut is None else self.shortcut(x)
        out: Tensor = past + self.conv2(self.norm2(self.conv1(self.norm1(x))))
        return out


class DecoderAttention(nn.Module):
    """Among all pixels; between map and tokens nothing moves."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.norm = NormAct(attention.group_norm, has_silu=False)
        self.to_q, self.to_k, self.to_v = attention.to_q, attention.to_k, attention.to_v
        self.to_out, self.heads = attention.to_out[0], attention.heads

    def forward(self, x: Tensor, temb: None = None) -> Tensor:
        tokens = self.norm(x).permute(0, 2, 3, 1).flatten(1, 2)
        found = attend(self.to_q(tokens), self.to_k(tokens), self.to_v(tokens), self.heads)
        out: Tensor = self.to_out(found).unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)
        return x + out


def rearrange_decoder(decoder: Any) -> None:
    """In place."""
    middle = decoder.mid_block
    middle.attentions = nn.ModuleList(DecoderAttention(each) for each in middle.attentions)
    for block in (middle, *decoder.up_blocks):
        block.resnets = nn.ModuleList(DecoderBlock(resnet) for resnet in block.resnets)
    decoder.conv_norm_out = NormAct(decoder.conv_norm_out, has_silu=True)
    decoder.conv_act = nn.Identity()
