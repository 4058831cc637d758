"""An IP-Adapter's network: pictures to the keys and values that the UNet's cross-attentions read.

The modules and weights are transformers' CLIP's and diffusers' projections', unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ImagePromptNetwork(nn.Module):
    """`projection` reads a picture's embedding (diffusers' ImageProjection) or the encoder's
    penultimate layer (IPAdapterPlusImageProjection)."""

    def __init__(self, vision: Any, projection: Any, keys: nn.ModuleList, values: nn.ModuleList):
        super().__init__()
        self.vision, self.projection, self.keys, self.values = vision, projection, keys, values
        self.reads_layers = not hasattr(projection, "image_embeds")

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """[pictures, channels, side, side] → keys and values in order, [pictures, tokens, width]"""
        if self.reads_layers:
            return self._text(self._layers(pixels))
        return self._text(self.vision(pixels).image_embeds)

    def without(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Return the keys and values of negative rows. As in diffusers, a resampler reads the
        encoding of zeros, a projection reads zeros."""
        if self.reads_layers:
            return self._text(self._layers(torch.zeros_like(pixels)))
        width = self.projection.image_embeds.in_features
        return self._text(pixels.new_zeros(len(pixels), width))

    def _layers(self, pixels: Tensor) -> Tensor:
        return self.vision(pixels, output_hidden_states=True).hidden_states[-2]

    def _text(self, encoded: Tensor) -> tuple[Tensor, ...]:
        tokens = self.projection(encoded)
        pairs = zip(self.keys, self.values, strict=True)
        return tuple(layer(tokens) for pair in pairs for layer in pair)
