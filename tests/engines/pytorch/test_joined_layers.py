"""Layers with the same input are joined to one layer with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from engines.parity.findings import relative_norm
from engines.pytorch.joined_layers import alike, joined
from tests.engines.eight_bit_layers import E4M3, eight_bit_layer

MOST_ERROR = {torch.int8: 0.01, E4M3: 0.04}
"""the relative L2 error that a second rounding of the weights adds"""


def apart(number: torch.dtype) -> list[Any]:
    """Layers of the same input after SmoothQuant: steps differ by a few percent, in one channel
    more."""
    torch.manual_seed(0)
    layers: list[Any] = [eight_bit_layer(96, 32, number) for _ in range(3)]
    for layer in layers[1:]:
        factors = torch.rand(96) * 0.2 + 0.9
        factors[5] = 3
        layer.steps = layer.steps * factors
        layer.scale = layer.scale / factors.mean()
    return layers


@pytest.mark.parametrize("number", [torch.int8, E4M3])
def test_layers_that_round_their_input_differently_become_one(number: torch.dtype) -> None:
    layers, x = apart(number), torch.randn(2, 7, 96)
    one: Any = joined(layers)
    found = one(x).chunk(3, dim=-1)
    exact = [x @ (each.weight.float() * each.scale[:, None] * each.steps).T for each in layers]
    for mine, own, expected in zip(found, (each(x) for each in layers), exact, strict=True):
        most = relative_norm(own, expected) + MOST_ERROR[number]
        measured = relative_norm(mine, expected)
        assert measured <= most, f"{measured:.4f}, at most {most:.4f}"


@pytest.mark.parametrize("number", [torch.int8, E4M3])
def test_common_steps_clip_no_value_that_a_layer_keeps(number: torch.dtype) -> None:
    layers = apart(number)
    made = alike(layers)
    for steps in (each.steps for each in layers):
        assert bool((made[0].steps <= steps).all())
    assert all(torch.equal(each.steps, made[0].steps) for each in made)


def test_a_filter_of_zeros_stays_one() -> None:
    layers = apart(torch.int8)
    layers[1].weight = layers[1].weight.clone()
    layers[1].weight[3] = 0
    one: Any = joined(layers)
    found = one(torch.randn(1, 4, 96))
    assert found.isfinite().all() and not found[..., 32 + 3].any()


def test_layers_that_round_alike_keep_their_numbers() -> None:
    layers = [eight_bit_layer(96, 32, torch.int8) for _ in range(3)]
    assert alike(layers) is layers
    one: Any = joined(layers)
    assert torch.equal(one.weight, torch.cat([each.weight for each in layers]))


def test_a_bias_keeps_floats_apart() -> None:
    assert joined([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]) is None
