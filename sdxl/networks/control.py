"""SDXL's ControlNets, cut like the UNet into a part that runs once a picture and one for each step.

The modules and weights are diffusers' ControlNetModel's and ControlNetUnionModel's, unchanged. A
union differs only in the first part, which joins several hints to one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdxl.networks.attention import take_ready_text
from sdxl.networks.unet import Descent, FirstSkips, PromptUNet, Stem


class ControlPrompt(nn.Module):
    """The part that runs once a picture: encodes the hint, the prompt and the size."""

    def __init__(self, control: Any) -> None:
        super().__init__()
        self.prompt = PromptUNet(control)
        self.hint_embedding: Any = control.controlnet_cond_embedding

    def forward(
        self, context: Tensor, pooled: Tensor, time_ids: Tensor, hint: Tensor
    ) -> tuple[Tensor, ...]:
        return self.hint_embedding(hint), *self.prompt(context, pooled, time_ids)


class UnionPrompt(ControlPrompt):
    """ControlPrompt of a union: a row has several hints, each with its type and scale."""

    def __init__(self, union: Any) -> None:
        super().__init__(union)
        self.task_embedding = union.task_embedding
        self.mixer: Any = union.transformer_layes
        self.shift: Any = union.spatial_ch_projs
        self.type_proj, self.type_embedding = union.control_type_proj, union.control_add_embedding

    def forward(  # type: ignore[override]
        self,
        context: Tensor,
        pooled: Tensor,
        time_ids: Tensor,
        hints: Tensor,
        types: Tensor,
        scales: Tensor,
    ) -> tuple[Tensor, ...]:
        """`types` has a 1 at each hint's type: [rows, hints, types]."""
        maps = self.hint_embedding(hints.flatten(0, 1)).unflatten(0, hints.shape[:2])
        scales = scales.to(maps.dtype)[:, :, None]
        tokens = (maps.mean((3, 4)) + torch.matmul(types, self.task_embedding)) * scales
        for layer in self.mixer:
            tokens = _alone(layer, tokens)
        mixed = (maps + self.shift(tokens)[..., None, None]) * scales[..., None, None]
        used = self.type_proj(types.amax(1).flatten()).to(pooled.dtype).reshape(len(types), -1)
        added, *text = self.prompt(context, pooled, time_ids)
        return mixed.sum(1), added + self.type_embedding(used), *text


class ControlDeep(nn.Module):
    """The part that runs in a step: the residuals, scaled by each row's strengths."""

    def __init__(self, control: Any) -> None:
        super().__init__()
        take_ready_text(control)
        self.stem, self.first_skips = Stem(control), FirstSkips(control)
        self.descent = Descent(control)
        middle = control.controlnet_mid_block
        self.projections = nn.ModuleList([*control.controlnet_down_blocks, middle])

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        strengths: Tensor,
        hint: Tensor,
        added: Tensor,
        *text: Tensor,
    ) -> tuple[Tensor, ...]:
        hidden, embedding, text = self.stem(sample, timestep, added, text)
        hidden = hidden + hint
        skips = [hidden, *self.first_skips(hidden, embedding)]
        middle, stack = self.descent.descend(skips, embedding, text)
        shares = strengths.to(sample.dtype)[:, :, None, None, None].unbind(1)
        terms = zip(self.projections, [*stack, middle], shares, strict=True)
        return tuple(projection(x) * share for projection, x, share in terms)


def control_networks(control: nn.Module) -> dict[str, nn.Module]:
    """Return the two networks of diffusers' ControlNetModel or ControlNetUnionModel."""
    is_union = hasattr(control, "task_embedding")
    prompt = UnionPrompt(control) if is_union else ControlPrompt(control)
    return {"control_prompt": prompt, "control_deep": ControlDeep(control)}


def net_like(unet: Any, dtype: str) -> Any:
    """Return a ControlNet of the same shape as a UNet, channels last, with random weights."""
    from diffusers.models.controlnets.controlnet import ControlNetModel

    net: Any = ControlNetModel.from_unet(unet, load_weights_from_unet=False)
    # diffusers' `to` prints warnings that concern other models.
    cast: Any = nn.Module.to(net, getattr(torch, dtype))
    return cast.to(memory_format=torch.channels_last)


def _alone(layer: Any, tokens: Tensor) -> Tensor:
    """Run a layer of the union's mixer as if each row were alone in its call.

    In diffusers and in its authors' code this layer attends over the rows of a call, not over the
    hints. A row that is alone attends only to itself, so attention returns its values. Here a row
    never depends on other rows.
    """
    attention, normed = layer.attn, layer.ln_1(tokens)
    width = tokens.shape[-1]
    values = F.linear(normed, attention.in_proj_weight[-width:], attention.in_proj_bias[-width:])
    tokens = tokens + attention.out_proj(values)
    return tokens + layer.mlp(layer.ln_2(tokens))
