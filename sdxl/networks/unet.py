"""SDXL's UNet cut into stem, core and tail, and the Deep and Shallow networks made of them.

The modules are those of diffusers' UNet2DConditionModel, with its weights unchanged; only the
order of calls is written here, so that it exports without Python branching on sizes: an upsampled
tensor always takes the size of the skip it meets. It knows nothing of steps or caches in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdxl.specs import Cut

SUPPORTED: Mapping[str, Any] = {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "addition_embed_type": "text_time",
    "center_input_sample": False,
    "class_embed_type": None,
    "encoder_hid_dim_type": None,
    "time_cond_proj_dim": None,
    "time_embedding_act_fn": None,
    "resnet_time_scale_shift": "default",
}
"""The UNet config entries that make a model an SDXL; anything else is refused at load."""


class Stem(nn.Module):
    """What every step computes afresh: conv_in and the embedding of time and size."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.conv_in = unet.conv_in
        self.time_proj, self.time_embedding = unet.time_proj, unet.time_embedding
        self.add_time_proj, self.add_embedding = unet.add_time_proj, unet.add_embedding

    def forward(
        self, sample: Tensor, timestep: Tensor, pooled: Tensor, time_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        # The sinusoids are float32 whatever the weights; half graphs are strongly typed, so the
        # casts are spelled out.
        time = self.time_proj(timestep).to(sample.dtype)
        sizes = self.add_time_proj(time_ids.flatten()).to(sample.dtype)
        added = torch.cat([pooled, sizes.reshape(pooled.shape[0], -1)], dim=-1)
        return self.conv_in(sample), self.time_embedding(time) + self.add_embedding(added)


class FirstSkips(nn.Module):
    """down_blocks.0's ResBlocks: the skips that the last up block reads besides conv_in."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.resnets: Any = unet.down_blocks[0].resnets

    def forward(self, hidden: Tensor, embedding: Tensor) -> list[Tensor]:
        skips = []
        for resnet in self.resnets:
            hidden = resnet(hidden, embedding)
            skips.append(hidden)
        return skips


class Core(nn.Module):
    """Everything between down_blocks.0's ResBlocks and the last up block: 95% of the arithmetic."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.downsamplers: Any = unet.down_blocks[0].downsamplers
        self.down_blocks = nn.ModuleList(unet.down_blocks[1:])
        self.mid_block: Any = unet.mid_block
        self.up_blocks = nn.ModuleList(unet.up_blocks[:-1])

    def forward(self, skips: Sequence[Tensor], embedding: Tensor, context: Tensor) -> Tensor:
        """`skips` are conv_in's output and FirstSkips'; the result has their height and width."""
        hidden = self.downsamplers[0](skips[-1])
        stack = [*skips, hidden]
        for block in self.down_blocks:
            hidden = _down(block, hidden, embedding, context, stack)
        mid = self.mid_block
        hidden = mid.resnets[0](hidden, embedding)
        for attention, resnet in zip(mid.attentions, mid.resnets[1:], strict=True):
            hidden = resnet(_attend(attention, hidden, context), embedding)
        for block in self.up_blocks:
            hidden = _up(block, hidden, embedding, context, stack)
        return hidden


class Tail(nn.Module):
    """The last up block and the output convolution: no attention, no text."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.resnets: Any = unet.up_blocks[-1].resnets
        self.norm: Any = unet.conv_norm_out
        self.activation: Any = unet.conv_act
        self.conv_out: Any = unet.conv_out

    def forward(self, hidden: Tensor, skips: Sequence[Tensor], embedding: Tensor) -> Tensor:
        for resnet, skip in zip(self.resnets, reversed(skips), strict=True):
            hidden = resnet(torch.cat([hidden, skip], dim=1), embedding)
        noise: Tensor = self.conv_out(self.activation(self.norm(hidden)))
        return noise


class DeepUNet(nn.Module):
    """The whole UNet, which also returns what the Shallow one needs of it."""

    def __init__(self, unet: Any, cut: Cut = "reference") -> None:
        super().__init__()
        self.cut = cut
        self.stem, self.first_skips = Stem(unet), FirstSkips(unet)
        self.core, self.tail = Core(unet), Tail(unet)

    def forward(
        self, sample: Tensor, timestep: Tensor, pooled: Tensor, time_ids: Tensor, context: Tensor
    ) -> tuple[Tensor, ...]:
        hidden, embedding = self.stem(sample, timestep, pooled, time_ids)
        fresh = self.first_skips(hidden, embedding)
        up = self.core([hidden, *fresh], embedding, context)
        noise = self.tail(up, [hidden, *fresh], embedding)
        return (noise, up, *fresh) if self.cut == "reference" else (noise, up)


class ShallowUNet(nn.Module):
    """Stem and tail around a cached core: 4.8% of the full UNet's arithmetic."""

    def __init__(self, unet: Any, cut: Cut = "reference") -> None:
        super().__init__()
        self.stem, self.tail = Stem(unet), Tail(unet)
        self.first_skips = FirstSkips(unet) if cut == "fresh_skips" else None

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        pooled: Tensor,
        time_ids: Tensor,
        cache_up: Tensor,
        *cache_skips: Tensor,
    ) -> tuple[Tensor]:
        hidden, embedding = self.stem(sample, timestep, pooled, time_ids)
        skips = self.first_skips(hidden, embedding) if self.first_skips else cache_skips
        return (self.tail(cache_up, [hidden, *skips], embedding),)


def _attend(attention: Any, hidden: Tensor, context: Tensor) -> Tensor:
    result: Tensor = attention(hidden, encoder_hidden_states=context, return_dict=False)[0]
    return result


def _down(
    block: Any, hidden: Tensor, embedding: Tensor, context: Tensor, stack: list[Tensor]
) -> Tensor:
    for resnet, attention in zip(block.resnets, block.attentions, strict=True):
        hidden = _attend(attention, resnet(hidden, embedding), context)
        stack.append(hidden)
    for downsampler in block.downsamplers or ():
        hidden = downsampler(hidden)
        stack.append(hidden)
    return hidden


def _up(
    block: Any, hidden: Tensor, embedding: Tensor, context: Tensor, stack: list[Tensor]
) -> Tensor:
    for resnet, attention in zip(block.resnets, block.attentions, strict=True):
        hidden = resnet(torch.cat([hidden, stack.pop()], dim=1), embedding)
        hidden = _attend(attention, hidden, context)
    hidden = F.interpolate(hidden, size=stack[-1].shape[-2:], mode="nearest")
    result: Tensor = block.upsamplers[0].conv(hidden)
    return result
