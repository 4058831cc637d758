"""Rescales a VAE for half precision.

SDXL's VAE overflows in half precision: sums in its blocks exceed 65504, and the picture turns
black. Norms ignore the scale of their input, so all sums can be 1/64 as large: the layers that add
to the sums are scaled by 1/64, and the norms' epsilons by its square. Only weights change, once. A
power of two rounds only tiny numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import nn

SHARE = 2.0**-6
"""Half precision then holds sums up to 4.2 million. A smaller share would round the weights."""


def fit_halves(vae: Any) -> None:
    """Rescale a VAE with float32 weights in place; its pictures stay the same in any precision."""
    for half in (vae.encoder, vae.decoder):
        _scale_layer(half.conv_in)
        _scale_epsilon(half.conv_norm_out)
        for module in half.modules():
            if isinstance(module, ResnetBlock2D):
                _scale_epsilon(module.norm1)
                _scale_epsilon(module.norm2)
                _scale_layer(module.conv1)
                _scale_layer(module.conv2)
                _scale_bias(module.conv_shortcut)
            elif isinstance(module, Attention):
                _scale_epsilon(module.group_norm)
                _scale_layer(module.to_out[0])
            elif isinstance(module, Upsample2D | Downsample2D):
                _scale_bias(module.conv)


@torch.no_grad()
def _scale_layer(layer: Any) -> None:
    layer.weight.mul_(SHARE)
    _scale_bias(layer)


@torch.no_grad()
def _scale_bias(layer: nn.Conv2d | nn.Linear | None) -> None:
    """Scale the bias alone: the layer's input is already scaled."""
    if layer is not None and layer.bias is not None:
        layer.bias.mul_(SHARE)


def _scale_epsilon(norm: Any) -> None:
    norm.eps *= SHARE**2
