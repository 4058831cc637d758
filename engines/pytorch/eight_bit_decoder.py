"""The VAE's decoder in 8 bits: its ResBlocks' convolutions, which are most of its arithmetic, in
E4M3.

They read what a norm made, so that nothing need be calibrated: from 2^-6 to 448 E4M3 keeps the same
share of a value whatever its size, and what a norm and SiLU make lies far inside. What adds up
between them, and what reads it unnormed, stays in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engines.pytorch.eight_bit import LARGEST, MAX_ROWS, EightBit

NUMBER = torch.float8_e4m3fn
LEAST_CAPABILITY = 8, 9
"""of a GPU with E4M3"""


def has_number(device: torch.device) -> bool:
    """A CPU multiplies the stored numbers in float32."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def put_decoder_layers(decoder: Any) -> None:
    """In place."""
    flags = torch.zeros(MAX_ROWS, device=decoder.conv_in.weight.device)
    for block in (decoder.mid_block, *decoder.up_blocks):
        for resnet in block.resnets:
            resnet.conv1, resnet.conv2 = (
                _layer(conv, flags) for conv in (resnet.conv1, resnet.conv2)
            )


def _layer(conv: nn.Conv2d, flags: torch.Tensor) -> EightBit:
    weight = conv.weight.detach().float().permute(0, 2, 3, 1)
    # A filter of zeros alone has any scale.
    scale = weight.flatten(1).abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    scale = scale / LARGEST[NUMBER]
    stored = (weight / scale.view(-1, 1, 1, 1)).to(NUMBER).contiguous()
    bias = torch.zeros_like(scale) if conv.bias is None else conv.bias.detach().float()
    steps = torch.ones(conv.in_channels, device=weight.device)
    return EightBit(stored, scale, steps, bias, flags)
