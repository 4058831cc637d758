"""diffusers' UNet rearranged for a GPU: the same weights and arithmetic in fewer passes.

All maps are channels-last from conv_in to conv_out. Group norm, SiLU and rounding to 8 bits are one
pass, and so are a residual's sum, its layer norm and rounding. The norm adds the time embedding.
Query, key and value are one product, and attention names its kernel. Unknown modules are not
changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines.low_rank import addition, is_adapting, plus_loras
from engines.pytorch.eight_bit import (
    EightBit,
    all_eight_bit,
    attend_in_e4m3,
    fits_attention,
    quartered,
)
from engines.pytorch.joined_layers import alike, joined
from engines.pytorch.launches import UNROUNDED, has_kernels, triton_module
from engines.pytorch.slot_convolution import SlotConvolution
from engines.pytorch.slots import sides_of
from sdxl.networks.attention import Text, attend, has_images, keys_and_values, plus_images

ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
Sum = tuple[Tensor, Tensor | None]
"""two terms of a sum; the second may be None"""


class NormAct(nn.Module):
    """A group norm, with or without SiLU. It rounds for `into`, the layer that reads the result."""

    def __init__(self, norm: Any, *, has_silu: bool) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.groups, self.eps, self.has_silu = norm.num_groups, norm.eps, has_silu

    def forward(
        self,
        x: Tensor,
        shift: Tensor | None = None,
        into: nn.Module | None = None,
        sums: Tensor | None = None,
    ) -> Tensor:
        """Norm x + `shift` [rows, channels]. `sums` are from `joined_maps`."""
        eight_bit = into if isinstance(into, EightBit) else None
        if has_kernels(x):
            is_slotted = isinstance(into, SlotConvolution) and sides_of(x) is not None
            rounding: Any = into.rounding if into and (eight_bit or is_slotted) else UNROUNDED
            return triton_module("kernels").norm_act(
                x.contiguous(memory_format=torch.channels_last),
                self.weight,
                self.bias,
                self.groups,
                self.eps,
                has_silu=self.has_silu,
                shift=shift,
                sums=sums,
                rounding=rounding,
            )
        value = x if shift is None else x + shift[:, :, None, None]
        value = F.group_norm(value, self.groups, self.weight, self.bias, self.eps)
        value = F.silu(value) if self.has_silu else value
        return eight_bit.stored(value) if eight_bit else value


def apply(
    layer: nn.Module,
    value: Tensor,
    like: Tensor,
    residual: Tensor | None = None,
    exact: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Apply a layer, with the call's LoRAs, to input that was rounded for it. The result has the
    type of `like`. `exact` computes a convolution's input before rounding."""
    if isinstance(layer, EightBit | SlotConvolution):
        residual = _with_loras(layer, residual, exact)
        return layer.product(value, like.dtype, residual)
    return layer(value) if residual is None else layer(value) + residual


def _with_loras(
    layer: nn.Module, residual: Tensor | None, exact: Callable[[], Tensor] | None
) -> Tensor | None:
    """Add an 8-bit convolution's LoRAs, which read the exact input, to the residual. 8-bit linear
    layers add LoRAs themselves, and other layers have hooks."""
    if not isinstance(layer, EightBit) or layer.weight.dim() == 2 or not is_adapting(layer):
        return residual
    assert exact is not None
    value = exact()
    return addition(layer, value) if residual is None else plus_loras(residual, layer, value)


def added_to(x: Tensor, layer: nn.Module, value: Tensor) -> Sum:
    """Add a layer's result to x. The 8-bit Triton product includes the sum. In other cases the next
    norm adds: PyTorch's product and that norm together take less time (docs/log.md)."""
    if isinstance(layer, EightBit) and not layer.is_scaled_mm(value, x.dtype):
        return apply(layer, value, x, x), None
    return x, apply(layer, value, x)


class AddNorm(nn.Module):
    """A layer norm of the sum of two terms."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(
        self, x: Tensor, added: Tensor | None, into: nn.Module | None
    ) -> tuple[Tensor, Tensor]:
        """Return the sum, and its norm rounded for `into`."""
        eight_bit = into if isinstance(into, EightBit) else None
        if has_kernels(x):
            rounding = eight_bit.rounding if eight_bit else UNROUNDED
            add_norm = triton_module("kernels").add_norm
            return add_norm(x, added, self.weight, self.bias, self.eps, rounding)
        x = x if added is None else x + added
        value = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return x, eight_bit.stored(value) if eight_bit else value


def shortcut_of(layer: Any, x: Tensor) -> Tensor:
    """Apply a block's 1×1 convolution, if it has one, as a product of tokens, because PyTorch adds
    a convolution's bias in an extra pass."""
    if layer is None:
        return x
    tokens = F.linear(tokens_of(x), layer.weight.flatten(1), layer.bias)
    return plus_loras(map_of(tokens, x.shape[2:]), layer, x)


def joined_maps(x: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Join two maps, channels last. Also return the sums for the norm, if a kernel computed
    them."""
    x = x.contiguous(memory_format=torch.channels_last)
    if beside is None:
        return x, None
    if has_kernels(x):
        beside = beside.contiguous(memory_format=torch.channels_last)
        return triton_module("kernels").summed(x, beside)
    return torch.cat([x, beside], dim=1), None


class ResBlock(nn.Module):
    """A ResBlock of the UNet, or of the VAE's decoder, which has no time embedding."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1 = NormAct(block.norm1, has_silu=True)
        self.norm2 = NormAct(block.norm2, has_silu=True)
        self.conv1, self.conv2, self.shortcut = block.conv1, block.conv2, block.conv_shortcut
        self.time_emb_proj = block.time_emb_proj

    def forward(self, x: Tensor, temb: Tensor | None = None, skip: Tensor | None = None) -> Tensor:
        return self.end(*self.begin(x, skip), temb)

    def begin(self, x: Tensor, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the part that does not depend on the time, as in `networks.unet`."""
        x, sums = joined_maps(x, skip)
        rounded, exact = self.norm1(x, into=self.conv1, sums=sums), partial(self.norm1, x)
        hidden = apply(self.conv1, rounded, x, exact=exact)
        return hidden, shortcut_of(self.shortcut, x)

    def end(self, hidden: Tensor, past: Tensor, embedding: Tensor | None) -> Tensor:
        time = None if embedding is None else self.time_emb_proj(F.silu(embedding))
        rounded = self.norm2(hidden, shift=time, into=self.conv2)
        exact = partial(self.norm2, hidden, shift=time)
        return apply(self.conv2, rounded, past, residual=past, exact=exact)


class Upsampler(nn.Module):
    """Nearest neighbours and a convolution. In 8 bits the product doubles the map. Both weights are
    kept, because odd latents are stretched, not doubled."""

    def __init__(self, upsampler: Any) -> None:
        super().__init__()
        self.conv = upsampler.conv
        is_eight_bit = isinstance(self.conv, EightBit)
        self.conv_quarters = quartered(self.conv) if is_eight_bit else None

    @property
    def takes_slots(self) -> bool:
        return self.conv_quarters is not None

    def forward(self, x: Tensor, sides: Sequence[int]) -> Tensor:
        height, width = x.shape[2:]
        is_doubled = tuple(sides) == (2 * height, 2 * width) or sides_of(x) is not None
        if self.conv_quarters is None or not is_doubled:
            return self.conv(F.interpolate(x, size=sides, mode="nearest"))
        doubled = self.conv_quarters(x)
        if is_adapting(self.conv):
            doubled = plus_loras(doubled, self.conv, F.interpolate(x, size=sides))
        return doubled


class Attention(nn.Module):
    """Attention among pixels; or, with `layer`, to a prompt whose keys and values are inputs.
    `layer` is the number of this cross-attention."""

    def __init__(self, attention: Any, kernel: str | None, layer: int | None = None) -> None:
        super().__init__()
        self.heads, self.to_out, self.layer = attention.heads, attention.to_out[0], layer
        projections = [attention.to_q, attention.to_k, attention.to_v]
        self.joint = self.pair = None
        # Joined layers replace the separate ones, whose weights would be in memory twice.
        if layer is None and kernel is None and all_eight_bit([*projections, self.to_out]):
            *pair, self.to_v = alike(projections)
            self.pair = joined(pair)
        elif layer is None:
            self.joint = joined(projections)
        if self.joint is None and self.pair is None:
            self.to_q, self.to_k, self.to_v = projections
        others = (backend for name, backend in ATTENTION.items() if name != kernel)
        self.order = None if kernel is None else [ATTENTION[kernel], *others]

    @property
    def reads(self) -> nn.Module | None:
        """The layer for which the input is rounded; None if several layers read it."""
        return self.joint or self.pair if self.layer is None else self.to_q

    @property
    def takes_slots(self) -> bool:
        """Whether the kernel knows the keys of each row. Attention to a prompt mixes no pixels."""
        if self.layer is not None:
            return True
        weight: Any = None if self.pair is None else self.pair.weight
        if weight is None or not triton_module("product").fits_tma(weight):
            return False
        return weight.shape[0] // 2 // self.heads in (64, 128)

    def forward(self, normed: Tensor, x: Tensor, text: Text = ()) -> Sum:
        """Add the attention of `normed` to x."""
        if self.pair is not None and fits_attention(normed, self.heads):
            mixed = attend_in_e4m3(self.pair, self.to_v, normed, self.heads, self.to_out)
            return added_to(x, self.to_out, mixed)
        projected = self._projected(normed, x, text)
        if self.layer is not None and not has_images() and self._rounds(projected[0]):
            text_attention = triton_module("attention").text_attention
            mixed = text_attention(*projected, self.heads, self.to_out.rounding)
            return added_to(x, self.to_out, mixed)
        with sdpa_kernel(self.order, set_priority=True) if self.order else nullcontext():
            mixed = attend(*projected, self.heads)
        if self.layer is not None:
            mixed = plus_images(mixed, projected[0], self.layer, self.heads)
        return added_to(x, self.to_out, added_for(self.to_out, mixed, None))

    def _rounds(self, query: Tensor) -> bool:
        """Return whether the Triton kernel attends to the prompt and rounds for the next layer."""
        if self.order is not None or not isinstance(self.to_out, EightBit):
            return False
        if not has_kernels(query):
            return False
        fits: bool = triton_module("attention").fits_text_attention(query, self.heads)
        return fits

    def _projected(self, x: Tensor, like: Tensor, text: Text) -> tuple[Tensor, Tensor, Tensor]:
        if self.layer is not None:
            return apply(self.to_q, x, like), *keys_and_values(text, self.layer)
        if self.joint is not None:
            query, key, value = apply(self.joint, x, like).chunk(3, dim=-1)
            return query, key, value
        if self.pair is not None:
            query, key = apply(self.pair, x, like).chunk(2, dim=-1)
            return query, key, apply(self.to_v, x, like)
        return self.to_q(x), self.to_k(x), self.to_v(x)


class FeedForward(nn.Module):
    """GEGLU between two linear layers."""

    def __init__(self, feed_forward: Any) -> None:
        super().__init__()
        self.rise, self.fall = feed_forward.net[0].proj, feed_forward.net[2]
        self.is_rounded = isinstance(self.rise, EightBit) and isinstance(self.fall, EightBit)
        if self.is_rounded:
            # The second layer's steps multiply the values, not their gates.
            steps = torch.cat([self.fall.steps, torch.ones_like(self.fall.steps)])
            self.register_buffer("gated_scale", self.rise.scale * steps, persistent=False)
            self.register_buffer("gated_bias", self.rise.bias * steps, persistent=False)

    def forward(self, normed: Tensor, x: Tensor) -> Sum:
        """Add the feed-forward of `normed` to x."""
        product: Any = triton_module("product") if has_kernels(normed) else None
        if self.is_rounded and product is not None and product.fits_tma(self.rise.weight):
            gated = product.gated_product(
                normed,
                self.rise.weight,
                self.gated_scale,
                self.gated_bias,
                self.fall.flags,
                self.fall.number,
                self.rise.low_rank(normed),
                self.rise.scale,
            )
            return added_to(x, self.fall, gated)
        return added_to(x, self.fall, self._gated(apply(self.rise, normed, x)))

    def _gated(self, hidden: Tensor) -> Tensor:
        into = self.fall if isinstance(self.fall, EightBit) else None
        if has_kernels(hidden):
            return triton_module("kernels").gated(hidden, into.rounding if into else UNROUNDED)
        value, gate = hidden.chunk(2, dim=-1)
        product = value * F.gelu(gate)
        return into.stored(product) if into else product


class Block(nn.Module):
    def __init__(self, block: Any, kernel: str | None, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = map(AddNorm, (block.norm1, block.norm2, block.norm3))
        self.attn1 = Attention(block.attn1, kernel)
        self.attn2 = Attention(block.attn2, kernel, layer)
        self.ff = FeedForward(block.ff)

    def forward(self, x: Tensor, added: Tensor | None, text: Text) -> Sum:
        x, normed = self.norm1(x, added, self.attn1.reads)
        x, normed = self.norm2(*self.attn1(normed, x), self.attn2.reads)
        x, normed = self.norm3(*self.attn2(normed, x, text), self.ff.rise)
        return self.ff(normed, x)


class Transformer(nn.Module):
    """Replaces diffusers' module, with the same signature. Maps and tokens share memory."""

    def __init__(self, transformer: Any, kernel: str | None, layers: Iterator[int]) -> None:
        super().__init__()
        self.norm = NormAct(transformer.norm, has_silu=False)
        self.proj_in, self.proj_out = transformer.proj_in, transformer.proj_out
        self.transformer_blocks = nn.ModuleList(
            Block(block, kernel, next(layers)) for block in transformer.transformer_blocks
        )

    def forward(
        self, x: Tensor, encoder_hidden_states: Text, return_dict: bool = False
    ) -> tuple[Tensor]:
        normed = self.norm(x, into=self.proj_in)
        tokens, added = apply(self.proj_in, tokens_of(normed), like=x), None
        for block in self.transformer_blocks:
            tokens, added = block(tokens, added, encoder_hidden_states)
        total = added_for(self.proj_out, tokens, added)
        out = apply(self.proj_out, total, like=x, residual=tokens_of(x))
        return (map_of(out, x.shape[2:]),)


def tokens_of(x: Tensor) -> Tensor:
    """View a channels-last map as tokens."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def map_of(tokens: Tensor, sides: torch.Size) -> Tensor:
    """View tokens as a channels-last map."""
    return tokens.unflatten(1, sides).permute(0, 3, 1, 2)


def added_for(layer: nn.Module, x: Tensor, added: Tensor | None) -> Tensor:
    """Return the sum, rounded for the layer."""
    if isinstance(layer, EightBit):
        return layer.stored(x, added)
    return x if added is None else x + added


def put_slot_convolutions(unet: Any) -> None:
    """Let the 16-bit convolutions support maps in slots."""
    for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
        for resnet in block.resnets:
            for name in ("conv1", "conv2"):
                if isinstance(conv := getattr(resnet, name), nn.Conv2d):
                    setattr(resnet, name, SlotConvolution(conv))
        for downsampler in getattr(block, "downsamplers", None) or ():
            downsampler.conv = SlotConvolution(downsampler.conv)
    unet.conv_in, unet.conv_out = SlotConvolution(unet.conv_in), SlotConvolution(unet.conv_out)


def takes_slots(unet: nn.Module) -> bool:
    """Return whether all modules of a rearranged UNet that mix pixels support maps in slots."""
    modules = list(unet.modules())
    wrapped = {id(each.conv) for each in modules if isinstance(each, SlotConvolution)}
    return all(
        each.takes_slots
        if isinstance(each, Attention | Upsampler)
        else not isinstance(each, nn.Conv2d) or each.kernel_size == (1, 1) or id(each) in wrapped
        for each in modules
    )


def rearrange(network: Any, attention: str | None = None) -> None:
    """Rearrange a UNet, before it is split into Deep and Shallow, or a ControlNet, in place."""
    layers, has_way_up = itertools.count(), hasattr(network, "up_blocks")
    if has_way_up and any(isinstance(module, EightBit) for module in network.modules()):
        put_slot_convolutions(network)
    up_blocks = network.up_blocks if has_way_up else ()
    for block in (*network.down_blocks, network.mid_block, *up_blocks):
        block.resnets = nn.ModuleList(ResBlock(resnet) for resnet in block.resnets)
        if getattr(block, "upsamplers", None):
            block.upsamplers = nn.ModuleList(Upsampler(each) for each in block.upsamplers)
        if getattr(block, "attentions", None):
            block.attentions = nn.ModuleList(
                # A middle block's attention may be None.
                each and Transformer(each, attention, layers)
                for each in block.attentions
            )
    if has_way_up:
        network.conv_norm_out = NormAct(network.conv_norm_out, has_silu=True)
        network.conv_act = nn.Identity()
