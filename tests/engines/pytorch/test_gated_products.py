"""The feed-forward's GEGLU inside the product before it: its launches and their arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton comes for Linux alone")

from engines.pytorch import eight_bit
from engines.pytorch.fast_unet import FeedForward
from engines.pytorch.launches import like_a_gpu, noted
from tests.engines.eight_bit_layers import E4M3, eight_bit_layer

WIDTH, INNER = 64, 256


def feed_forward(*, is_second_rounded: bool = True) -> FeedForward:
    rise = eight_bit_layer(WIDTH, 2 * INNER)
    fall = eight_bit_layer(INNER, WIDTH) if is_second_rounded else nn.Linear(INNER, WIDTH)
    first = SimpleNamespace(proj=rise)
    return FeedForward(SimpleNamespace(net=[first, None, fall]))


def launched(layer: FeedForward, *, has_tma: bool = True) -> list[str]:
    stored = torch.empty(2, 16, WIDTH, dtype=E4M3, device="meta")
    x = torch.empty(2, 16, WIDTH, device="meta")
    with like_a_gpu((9, 0) if has_tma else (8, 9)), torch.inference_mode(), noted() as launches:
        layer.to("meta")(stored, x)
    return [each.name for each in launches]


def test_between_8_bit_layers_nothing_is_left_but_two_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert launched(feed_forward()) == ["_gated_product"], "the second is PyTorch's own"
    monkeypatch.setattr(eight_bit, "has_scaled_mm", lambda *_: False)
    assert launched(feed_forward()) == ["_gated_product", "_tma_product"]


def test_without_a_memory_accelerator_or_8_bits_behind_it_gating_is_a_pass() -> None:
    # These products are PyTorch's.
    assert launched(feed_forward(), has_tma=False) == ["_gated"]
    assert launched(feed_forward(is_second_rounded=False)) == ["_gated"]


def test_the_second_layers_steps_are_in_the_values_and_not_in_the_gates() -> None:
    layer = feed_forward()
    layer.fall.steps *= torch.rand(INNER) + 1
    again = FeedForward(SimpleNamespace(net=[SimpleNamespace(proj=layer.rise), None, layer.fall]))
    expected = layer.rise.scale[:INNER] * layer.fall.steps
    values, gates = again.get_buffer("gated_scale").split(INNER)
    assert torch.equal(values, expected)
    assert torch.equal(gates, layer.rise.scale[INNER:])
    assert not [name for name in again.state_dict() if "gated" in name]
