"""diffusers' UNet rearranged for a GPU: the same weights and the same arithmetic in fewer passes.

Everything stays channels-last from conv_in to conv_out. Group norm, SiLU and the rounding to 8 bits
are one pass, the time embedding goes into the norm, query, key and value are one product, and
attention names its kernel. It knows no sizes and no precision; what it does not know it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines.eight_bit import EightBit
from engines.kernel_switch import has_kernels, kernels

ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class NormAct(nn.Module):
    """A group norm, with or without SiLU; `into` is the layer that reads the result."""

    def __init__(self, norm: Any, *, has_silu: bool) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.groups, self.eps, self.has_silu = norm.num_groups, norm.eps, has_silu

    def forward(
        self, x: Tensor, shift: Tensor | None = None, into: nn.Module | None = None
    ) -> Tensor:
        """`shift` [rows, channels] is added to x first."""
        eight_bit = into if isinstance(into, EightBit) else None
        if has_kernels(x):
            found: Tensor = kernels().norm_act(
                x.contiguous(memory_format=torch.channels_last),
                self.weight,
                self.bias,
                self.groups,
                self.eps,
                has_silu=self.has_silu,
                shift=shift,
                steps=eight_bit.steps if eight_bit else None,
                number=eight_bit.number if eight_bit else None,
            )
            return found
        value = x if shift is None else x + shift[:, :, None, None]
        value = F.group_norm(value, self.groups, self.weight, self.bias, self.eps)
        value = F.silu(value) if self.has_silu else value
        return eight_bit.stored(value) if eight_bit else value


def apply(layer: nn.Module, value: Tensor, like: Tensor, residual: Tensor | None = None) -> Tensor:
    """A layer on what its NormAct or Gated made for it; `like` has the type of the result."""
    if isinstance(layer, EightBit):
        return layer.product(value, like.dtype, residual)
    out: Tensor = layer(value)
    return out if residual is None else out + residual


class ResBlock(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1 = NormAct(block.norm1, has_silu=True)
        self.norm2 = NormAct(block.norm2, has_silu=True)
        self.conv1, self.conv2, self.shortcut = block.conv1, block.conv2, block.conv_shortcut
        self.time_emb_proj = block.time_emb_proj

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        time = self.time_emb_proj(F.silu(embedding))
        hidden = apply(self.conv1, self.norm1(x, into=self.conv1), x)
        hidden = self.norm2(hidden, shift=time, into=self.conv2)
        past = x if self.shortcut is None else self.shortcut(x)
        return apply(self.conv2, hidden, x, residual=past)


class Attention(nn.Module):
    def __init__(self, attention: Any, kernel: str | None) -> None:
        super().__init__()
        self.heads, self.to_out = attention.heads, attention.to_out[0]
        self.is_self = not attention.is_cross_attention
        projections = [attention.to_q, attention.to_k, attention.to_v]
        fused = projections if self.is_self else projections[1:]
        self.joint = joined(fused)
        self.apart = nn.ModuleList(
            projections if self.joint is None else projections[: -len(fused)]
        )
        others = (backend for name, backend in ATTENTION.items() if name != kernel)
        self.order = None if kernel is None else [ATTENTION[kernel], *others]

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        query, key, value = (self._heads(t) for t in self._projected(x, context))
        with sdpa_kernel(self.order, set_priority=True) if self.order else nullcontext():
            out = F.scaled_dot_product_attention(query, key, value)
        found: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return found

    def _projected(self, x: Tensor, context: Tensor | None) -> Sequence[Tensor]:
        other = x if self.is_self or context is None else context
        if self.joint is None:
            query, key, value = self.apart
            return [query(x), key(other), value(other)]
        if self.is_self:
            return self.joint(x).chunk(3, dim=-1)
        (query,) = self.apart
        return [query(x), *self.joint(other).chunk(2, dim=-1)]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """GEGLU between two linears."""

    def __init__(self, feed_forward: Any) -> None:
        super().__init__()
        self.rise, self.fall = feed_forward.net[0].proj, feed_forward.net[2]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.rise(x)
        into = self.fall if isinstance(self.fall, EightBit) else None
        if has_kernels(hidden):
            steps, number = (into.steps, into.number) if into else (None, None)
            return apply(self.fall, kernels().gated(hidden, steps=steps, number=number), x)
        value, gate = hidden.chunk(2, dim=-1)
        product = value * F.gelu(gate)
        return apply(self.fall, into.stored(product) if into else product, x)


class Block(nn.Module):
    def __init__(self, block: Any, kernel: str | None) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = block.norm1, block.norm2, block.norm3
        self.attn1, self.attn2 = Attention(block.attn1, kernel), Attention(block.attn2, kernel)
        self.ff = FeedForward(block.ff)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), context)
        found: Tensor = x + self.ff(self.norm3(x))
        return found


class Transformer(nn.Module):
    """Called as diffusers calls its own; between maps and tokens it moves nothing."""

    def __init__(self, transformer: Any, kernel: str | None) -> None:
        super().__init__()
        self.norm = NormAct(transformer.norm, has_silu=False)
        self.proj_in, self.proj_out = transformer.proj_in, transformer.proj_out
        self.blocks = nn.ModuleList(Block(b, kernel) for b in transformer.transformer_blocks)

    def forward(
        self, x: Tensor, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        tokens = self.proj_in(self.norm(x).permute(0, 2, 3, 1).flatten(1, 2))
        for block in self.blocks:
            tokens = block(tokens, encoder_hidden_states)
        out = self.proj_out(tokens).unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)
        return (out + x,)


def joined(layers: Sequence[nn.Module]) -> nn.Module | None:
    """One layer for several that read the same input; None where they round it differently."""
    if all(isinstance(layer, EightBit) for layer in layers):
        first, *others = layers
        if not all(torch.equal(first.steps, other.steps) for other in others):  # type: ignore[arg-type]
            return None
        weight, scale, bias = (
            torch.cat([getattr(layer, name) for layer in layers])
            for name in ("weight", "scale", "bias")
        )
        return EightBit(weight, scale, first.steps, bias)  # type: ignore[arg-type]
    if not all(isinstance(layer, nn.Linear) and layer.bias is None for layer in layers):
        return None
    weight = torch.cat([layer.weight for layer in layers])  # type: ignore[misc]
    joint = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joint.weight = nn.Parameter(weight, requires_grad=False)
    return joint


def rearrange(unet: Any, attention: str | None = None) -> None:
    """In place, before Deep and Shallow are made of it."""
    for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
        block.resnets = nn.ModuleList(ResBlock(resnet) for resnet in block.resnets)
        if getattr(block, "attentions", None):
            block.attentions = nn.ModuleList(Transformer(t, attention) for t in block.attentions)
    unet.conv_norm_out = NormAct(unet.conv_norm_out, has_silu=True)
    unet.conv_act = nn.Identity()
