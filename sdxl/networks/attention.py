"""Attention in the UNet, with precomputed keys and values of prompts and image prompts.

`Attend` is a processor of diffusers' Attention modules and leaves their weights unchanged. In a
graph it becomes one ONNX attention operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Text = Sequence[Tensor]
"""Keys and values of every cross-attention in order, [rows, tokens, width] each."""


@dataclass(frozen=True)
class _Images:
    """The image prompts of the current call."""

    text: Text
    """keys and values, [rows, images, tokens, width] each"""
    mask: Tensor
    """[rows, images, tokens], added to the scores"""


_images: ContextVar[_Images | None] = ContextVar("image prompts", default=None)


@contextmanager
def prompted(text: Text, mask: Tensor) -> Iterator[None]:
    """Make the UNet's cross-attentions also attend to image prompts within the block."""
    token = _images.set(_Images(text, mask))
    try:
        yield
    finally:
        _images.reset(token)


def has_images() -> bool:
    """True if the current call has image prompts."""
    return _images.get() is not None


class Attend:
    """Attention of one layer."""

    def __init__(self, layer: int | None) -> None:
        self.layer = layer
        """number of the cross-attention in the order of calls; None: self-attention"""

    def __call__(
        self,
        attention: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | Text | None = None,
        attention_mask: None = None,
        temb: None = None,
    ) -> Tensor:
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if isinstance(source, Tensor):
            key, value = attention.to_k(source), attention.to_v(source)
        else:
            assert self.layer is not None
            key, value = keys_and_values(source, self.layer)
        query = attention.to_q(hidden_states)
        mixed = attend(query, key, value, attention.heads)
        if self.layer is not None:
            mixed = plus_images(mixed, query, self.layer, attention.heads)
        return attention.to_out[0](mixed)


def keys_and_values(text: Text, layer: int) -> tuple[Tensor, Tensor]:
    return text[2 * layer], text[2 * layer + 1]


def attend(
    query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None = None
) -> Tensor:
    """Return the attention; all tensors are [rows, positions, width]."""
    if torch.compiler.is_exporting():
        # Every backend has a kernel for this node.
        return torch.onnx.ops.attention(query, key, value, q_num_heads=heads, kv_num_heads=heads)[0]
    query, key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, mask)
    return mixed.transpose(1, 2).flatten(2)


def plus_images(mixed: Tensor, query: Tensor, layer: int, heads: int) -> Tensor:
    """Add the attention to each image prompt of the call. An image prompt's values include its
    strength; a row without image prompts has values of 0."""
    images = _images.get()
    if images is None:
        return mixed
    keys, values = keys_and_values(images.text, layer)
    if not torch.compiler.is_exporting():
        # One after the other: the scores of all image prompts at once may take 40 GB.
        for number, mask in enumerate(images.mask.unbind(1)):
            key, value = keys[:, number], values[:, number]
            mixed = mixed + attend(query, key, value, heads, mask[:, None, None])
        return mixed
    tensors = query[:, None], keys, values
    query, key, value = (t.unflatten(-1, (heads, -1)).transpose(2, 3) for t in tensors)
    scores = torch.matmul(query * query.shape[-1] ** -0.5, key.mT)
    shares = torch.softmax(scores + images.mask[:, :, None, None], -1)
    added = torch.matmul(shares, value).sum(1)
    return mixed + added.transpose(1, 2).flatten(2)


def cross_attentions(unet: Any) -> Iterator[Any]:
    """Yield the cross-attentions of a UNet or a ControlNet in the order of calls."""
    for block in (*unet.down_blocks, unet.mid_block, *getattr(unet, "up_blocks", ())):
        for transformer in getattr(block, "attentions", None) or ():
            for each in transformer.transformer_blocks:
                yield each.attn2


def take_ready_text(unet: Any) -> None:
    """Make the UNet's blocks accept keys and values (Text) in place of a prompt's encoding."""
    layers = {id(cross): layer for layer, cross in enumerate(cross_attentions(unet))}
    for module in unet.modules():
        if hasattr(module, "set_processor"):
            module.set_processor(Attend(layers.get(id(module))))
