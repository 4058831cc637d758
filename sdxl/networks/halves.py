"""Rescales a VAE for half precision.

SDXL's VAE overflows in half precision: the sums in its blocks exceed 65504, and the picture turns
black. Every norm ignores its input's scale, so all sums can be kept at a 64th: the layers that add
to them are scaled by 1/64, and so are the norms' epsilons. Only weights change, once. A power of
two rounds nothing but tiny numbers.
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
"""Half precision then holds sums up to 4.2 million; with a smaller share weights would lose
digits."""


def fit_halves(vae: Any) -> None:
    """Rescale a VAE with float32 weights in place; its pictures stay the same in any precision."""
    for half in (vae.encoder, vae.decoder):
        _give_a_share(half.conv_in)
        _expect_a_share(half.conv_norm_out)
        for module in half.modules():
            if isinstance(module, ResnetBlock2D):
                _expect_a_share(module.norm1, module.norm2)
                _give_a_share(module.conv1, module.conv2)
                _pass_a_share(module.conv_shortcut)
            elif isinstance(module, Attention):
                _expect_a_share(module.group_norm)
                _give_a_share(module.to_out[0])
            elif isinstance(module, Upsample2D | Downsample2D):
                _pass_a_share(module.conv)


@torch.no_grad()
def _give_a_share(*layers: Any) -> None:
    for layer in layers:
        layer.weight.mul_(SHARE)
        _pass_a_share(layer)


@torch.no_grad()
def _pass_a_share(layer: nn.Conv2d | nn.Linear | None) -> None:
    """The block's input is already scaled."""
    if layer is not None and layer.bias is not None:
        layer.bias.mul_(SHARE)


def _expect_a_share(*norms: Any) -> None:
    for norm in norms:
        norm.eps *= SHARE**2
