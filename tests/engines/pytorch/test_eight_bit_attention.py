"""Attention in 8 bits: where it runs, its error, and that a NaN shows."""

from __future__ import annotations

import copy
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.pytorch.eight_bit import EightBit, attend_in_e4m3
from engines.pytorch.fast_unet import Attention, Block
from engines.pytorch.joined_layers import joined
from engines.pytorch.launches import LARGEST, noted
from tests.engines.distances import check_near
from tests.engines.eight_bit_layers import E4M3, eight_bit_layer
from tests.engines.meta_launches import launches_of

MOST_ERROR = 0.06
"""the relative L2 error of attention in E4M3 against floats, with scores of deviation 1"""
LAYERS = 70
"""the layers of SDXL with attention among pixels"""


def in_floats(layers: list[EightBit], stored: Tensor, heads: int) -> Tensor:
    """Attention in floats, between the same layers in 8 bits."""
    made = [each.product(stored, torch.float32).double() for each in layers]
    split = [each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in made]
    return F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("number", [torch.int8, E4M3])
@pytest.mark.parametrize(("heads", "channels", "tokens"), [(10, 640, 320), (20, 1280, 112)])
def test_attention_is_near_floats_with_the_widths_of_sdxl(
    number: torch.dtype, heads: int, channels: int, tokens: int
) -> None:
    torch.manual_seed(0)
    layers = [eight_bit_layer(channels, channels, number) for _ in range(3)]
    stored = layers[0].stored(torch.randn(2, tokens, channels))
    expected, reader = in_floats(layers, stored, heads), eight_bit_layer(channels, channels, number)
    reader.steps = torch.full((channels,), LARGEST[number]) / expected.abs().max().float()
    found = attend_in_e4m3(joined(layers[:2]), layers[2], stored, heads, reader)
    assert found.dtype == number
    check_near(found.double() / reader.steps, expected, MOST_ERROR, (number, channels))


@pytest.mark.parametrize("number", [torch.int8, E4M3])
def test_a_nan_shows_in_its_row_alone(number: torch.dtype) -> None:
    layers, reader = [eight_bit_layer(64, 64) for _ in range(3)], eight_bit_layer(64, 64, number)
    x = torch.randn(3, 16, 64)
    x[1, 5, 7] = torch.nan
    found = attend_in_e4m3(joined(layers[:2]), layers[2], layers[0].stored(x), 2, reader)
    shown = reader.flags if number == torch.int8 else found.float().flatten(1).sum(1)
    assert shown[:3].isnan().tolist() == [False, True, False]


def block_of(width: int, heads: int) -> Any:
    """A transformer block of diffusers, as in SDXL."""
    from diffusers.models.attention import BasicTransformerBlock

    made: Any = BasicTransformerBlock(width, heads, width // heads, cross_attention_dim=32)
    return made


def in_8_bits(block: nn.Module, *names: str) -> nn.Module:
    ours: Any = copy.deepcopy(block)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(ours.get_submodule(parent), child, eight_bit_layer(64, 64))
    return ours


SELF = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")


@pytest.mark.parametrize(
    ("names", "kernel", "is_eight_bit"),
    [(SELF, None, True), (SELF[:3], None, False), (SELF, "math", False), ((), None, False)],
)
def test_attention_is_in_8_bits_between_8_bit_layers_unless_a_kernel_is_named(
    names: tuple[str, ...], kernel: str | None, is_eight_bit: bool
) -> None:
    ours = Block(in_8_bits(block_of(64, 2), *names), kernel, next(count()))
    attentions = [m for m in ours.modules() if isinstance(m, Attention)]
    assert [m.pair is not None for m in attentions] == [is_eight_bit, False]
    x = torch.randn(2, 16, 64)
    with torch.inference_mode():
        found = ours.attn1(ours.norm1(x, None, ours.attn1.reads)[1], x)
    assert found[0].shape == x.shape


def test_every_size_has_attention_in_8_bits() -> None:
    """Also if 16 does not divide the tokens: 31 × 31 at the lowest level of 992 pixels."""
    for side in (1024, 992, 1000):
        names = [each.name for each in launches_of("unet_deep", "fp8", 2, side)]
        assert names.count("_attention") == LAYERS, side


def test_values_that_e4m3_cannot_hold_become_the_largest() -> None:
    wide = eight_bit_layer(16, 16)
    wide.bias += torch.tensor([1e4, -1e4] * 8)
    stored = wide.stored(torch.randn(1, 3, 16))
    for found in (wide.product(stored, E4M3), wide.transposed(stored, E4M3).permute(1, 2, 0)):
        assert found.float()[0, 0].tolist() == [448.0, -448.0] * 8


def test_attention_rounds_for_to_out() -> None:
    block: Any = Block(in_8_bits(block_of(64, 1), *SELF), None, 0)
    with torch.device("meta"), noted() as launches, torch.inference_mode():
        block.to("meta").attn1(torch.empty(2, 16, 64, dtype=E4M3), torch.empty(2, 16, 64))
    assert [each.name for each in launches] == ["_tma_product", "_tma_product", "_attention"]
