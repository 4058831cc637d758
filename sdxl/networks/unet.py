"""SDXL's UNet cut into stem, core and tail, and the Prompt, Deep and Shallow networks made of it.

The modules and weights are diffusers' UNet2DConditionModel's, unchanged. The order of calls is
written here, so that an export has no branches on sizes: an upsampled tensor always takes the size
of the skip that it is joined with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from sdxl.networks.attention import Text, cross_attentions, take_ready_text
from sdxl.specs import Cut

SUPPORTED: Mapping[str, Any] = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "reverse_transformer_layers_per_block": None,
    "addition_embed_type": "text_time",
    "center_input_sample": False,
    "class_embed_type": None,
    "encoder_hid_dim_type": None,
    "time_embedding_act_fn": None,
    "resnet_time_scale_shift": "default",
}
"""UNet config entries of every SDXL; other values are refused at load."""
REFINER: Mapping[str, Any] = {
    **SUPPORTED,
    "down_block_types": [*SUPPORTED["down_block_types"], "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *SUPPORTED["up_block_types"]],
}
"""The entries of a refiner with four levels, whose lowest has no attention. A refiner with three
levels has those of SDXL."""


class PromptUNet(nn.Module):
    """The part that runs once a picture: the embedding of prompt and size, and the text's keys and
    values. 13% of the weights of SDXL's UNet."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.add_time_proj, self.add_embedding = unet.add_time_proj, unet.add_embedding
        self.condition: Any = unet.time_embedding.cond_proj
        attentions = list(cross_attentions(unet))
        self.keys = nn.ModuleList(attention.to_k for attention in attentions)
        self.values = nn.ModuleList(attention.to_v for attention in attentions)

    def forward(
        self, context: Tensor, pooled: Tensor, time_ids: Tensor, *guidance: Tensor
    ) -> tuple[Tensor, ...]:
        """`guidance` is the guidance embedding, if the model has one."""
        # The sinusoids are always float32. Half-precision graphs are strongly typed and need the
        # cast.
        sizes = self.add_time_proj(time_ids.flatten()).to(pooled.dtype)
        added = torch.cat([pooled, sizes.reshape(pooled.shape[0], -1)], dim=-1)
        text = [
            layer(context) for pair in zip(self.keys, self.values, strict=True) for layer in pair
        ]
        conditions = [self.condition(embedding) for embedding in guidance]
        return self.add_embedding(added), *conditions, *text


class Stem(nn.Module):
    """The first part of every step: conv_in and the time embedding."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.conv_in = unet.conv_in
        self.time_proj, self.time_embedding = unet.time_proj, unet.time_embedding
        self.reads_guidance = unet.time_embedding.cond_proj is not None

    def forward(
        self, sample: Tensor, timestep: Tensor, added: Tensor, rest: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Take the guidance condition, if the model has one, from `rest`; return the others."""
        time = self.time_proj(timestep).to(sample.dtype)
        if self.reads_guidance:
            condition, *rest = rest
            time = time + condition
        return self.conv_in(sample), self.time_embedding(time) + added, rest


class FirstSkips(nn.Module):
    """down_blocks.0's ResBlocks. Their outputs are skips of the last up block."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.resnets: Any = unet.down_blocks[0].resnets

    def forward(self, hidden: Tensor, embedding: Tensor) -> list[Tensor]:
        skips = []
        for resnet in self.resnets:
            hidden = resnet(hidden, embedding)
            skips.append(hidden)
        return skips


class Descent(nn.Module):
    """The part from down_blocks.0's downsampler to the middle block; also of a ControlNet."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.downsamplers: Any = network.down_blocks[0].downsamplers
        self.down_blocks = nn.ModuleList(network.down_blocks[1:])
        self.mid_block: Any = network.mid_block

    def descend(
        self, skips: Sequence[Tensor], embedding: Tensor, text: Text
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the middle block's output and all skips; `skips` are conv_in's and FirstSkips'."""
        hidden = self.downsamplers[0](skips[-1])
        stack = [*skips, hidden]
        for block in self.down_blocks:
            hidden = _down(block, hidden, embedding, text, stack)
        mid = self.mid_block
        hidden = mid.resnets[0](hidden, embedding)
        for attention, resnet in zip(mid.attentions, mid.resnets[1:], strict=True):
            hidden = resnet(_attend(attention, hidden, text), embedding)
        return hidden, stack


class Core(Descent):
    """Everything between down_blocks.0's ResBlocks and the last up block: 95% of the arithmetic."""

    def __init__(self, unet: Any) -> None:
        super().__init__(unet)
        self.up_blocks = nn.ModuleList(unet.up_blocks[:-1])

    def forward(
        self,
        skips: Sequence[Tensor],
        embedding: Tensor,
        text: Text,
        residuals: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the last up block's input. `residuals`: for Core's skips and the middle block."""
        hidden, stack = self.descend(skips, embedding, text)
        if residuals:
            *others, middle = residuals
            stack = [*skips, *_plus(stack[len(skips) :], others)]
            hidden = hidden + middle
        for block in self.up_blocks:
            hidden = _up(block, hidden, embedding, text, stack)
        return hidden


class Tail(nn.Module):
    """The last up block and the output convolution, which read no text."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.resnets: Any = unet.up_blocks[-1].resnets
        self.norm: Any = unet.conv_norm_out
        self.activation: Any = unet.conv_act
        self.conv_out: Any = unet.conv_out

    def begin(self, up: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """Run the part that depends only on the core and the last skip."""
        return _begin(self.resnets[0], up, skip)

    def end(
        self, hidden: Tensor, past: Tensor, skips: Sequence[Tensor], embedding: Tensor
    ) -> Tensor:
        hidden = _end(self.resnets[0], hidden, past, embedding)
        for resnet, skip in zip(self.resnets[1:], reversed(skips), strict=True):
            hidden = _reading(resnet, hidden, skip, embedding)
        return self.conv_out(self.activation(self.norm(hidden)))


class DeepUNet(nn.Module):
    """The whole UNet of a step. It also returns the caches that ShallowUNet reads. The residuals of
    ControlNets may follow the other inputs."""

    def __init__(self, unet: Any, cut: Cut = "reference") -> None:
        super().__init__()
        take_ready_text(unet)
        self.cut = cut
        self.texts = 2 * sum(1 for _ in cross_attentions(unet))
        self.stem, self.first_skips = Stem(unet), FirstSkips(unet)
        self.core, self.tail = Core(unet), Tail(unet)

    def forward(
        self, sample: Tensor, timestep: Tensor, added: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        hidden, embedding, others = self.stem(sample, timestep, added, rest)
        text, residuals = others[: self.texts], others[self.texts :]
        skips = [hidden, *self.first_skips(hidden, embedding)]
        up = self.core(skips, embedding, text, residuals[len(skips) :])
        # The caches include the residuals.
        skips = _plus(skips, residuals)
        last = skips.pop()
        begun = self.tail.begin(up, last)
        noise = self.tail.end(*begun, skips, embedding)
        return (noise, *begun, *skips[1:]) if self.cut == "reference" else (noise, up)


class ShallowUNet(nn.Module):
    """Stem and tail around a cached core. If the skips are cached too, the tail's first half block
    is cached as its output instead of its input. Residuals for the skips that ShallowUNet computes
    may follow the other inputs."""

    def __init__(self, unet: Any, cut: Cut = "reference") -> None:
        super().__init__()
        self.stem, self.tail = Stem(unet), Tail(unet)
        self.first_skips = FirstSkips(unet) if cut == "fresh_skips" else None

    def forward(
        self, sample: Tensor, timestep: Tensor, added: Tensor, *rest: Tensor
    ) -> tuple[Tensor]:
        hidden, embedding, others = self.stem(sample, timestep, added, rest)
        if self.first_skips is None:
            count = len(self.tail.resnets)
            (half, past, *cached), residuals = others[:count], others[count:]
            skips = [*_plus([hidden], residuals), *cached]
            return (self.tail.end(half, past, skips, embedding),)
        up, *residuals = others
        skips = _plus([hidden, *self.first_skips(hidden, embedding)], residuals)
        begun = self.tail.begin(up, skips.pop())
        return (self.tail.end(*begun, skips, embedding),)


def _plus(skips: list[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
    """Add a residual to each skip, if there are any residuals."""
    if not residuals:
        return skips
    return [skip + residual for skip, residual in zip(skips, residuals, strict=False)]


def _reading(block: Any, hidden: Tensor, skip: Tensor, embedding: Tensor) -> Tensor:
    """Run a ResBlock on a hidden state and a skip. A backend's block joins them itself."""
    if not isinstance(block, ResnetBlock2D):
        return block(hidden, embedding, skip)
    return block(torch.cat([hidden, skip], dim=1), embedding)


def _begin(block: Any, hidden: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Run a ResBlock up to the time embedding; return the hidden state and the shortcut."""
    if not isinstance(block, ResnetBlock2D):
        return block.begin(hidden, skip)
    x = torch.cat([hidden, skip], dim=1)
    return block.conv1(F.silu(block.norm1(x))), block.conv_shortcut(x)


def _end(block: Any, hidden: Tensor, past: Tensor, embedding: Tensor) -> Tensor:
    if not isinstance(block, ResnetBlock2D):
        return block.end(hidden, past, embedding)
    hidden = hidden + block.time_emb_proj(F.silu(embedding))[:, :, None, None]
    return past + block.conv2(F.silu(block.norm2(hidden)))


def _attend(attention: Any, hidden: Tensor, text: Text) -> Tensor:
    return attention(hidden, encoder_hidden_states=text, return_dict=False)[0]


def _attentions(block: Any) -> Sequence[Any]:
    """Return each ResBlock's attention; None in small ControlNets and in refiners."""
    return getattr(block, "attentions", None) or [None] * len(block.resnets)


def _down(block: Any, hidden: Tensor, embedding: Tensor, text: Text, stack: list[Tensor]) -> Tensor:
    for resnet, attention in zip(block.resnets, _attentions(block), strict=True):
        hidden = resnet(hidden, embedding)
        if attention is not None:
            hidden = _attend(attention, hidden, text)
        stack.append(hidden)
    for downsampler in block.downsamplers or ():
        hidden = downsampler(hidden)
        stack.append(hidden)
    return hidden


def _up(block: Any, hidden: Tensor, embedding: Tensor, text: Text, stack: list[Tensor]) -> Tensor:
    for resnet, attention in zip(block.resnets, _attentions(block), strict=True):
        hidden = _reading(resnet, hidden, stack.pop(), embedding)
        if attention is not None:
            hidden = _attend(attention, hidden, text)
    return _upsampled(block.upsamplers[0], hidden, stack[-1].shape[-2:])


def _upsampled(upsampler: Any, hidden: Tensor, sides: Any) -> Tensor:
    if not isinstance(upsampler, Upsample2D):
        return upsampler(hidden, sides)
    return upsampler.conv(F.interpolate(hidden, size=sides, mode="nearest"))
