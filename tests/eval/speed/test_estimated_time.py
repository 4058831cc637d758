"""Estimated time: work is counted correctly, and time follows from the stated rates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eval.speed.estimated_time import GAP_S, GPUS, RATES, report, seconds_by_group, seconds_of
from eval.speed.kernel_work import KernelWork, work_of
from eval.speed.meta_networks import PRECISIONS
from sdxl.cli import main

H200 = GPUS["h200"]
WORK = KernelWork("x", "product", False, 16, 2e12, 1e9, depth=400, results=(65536, 1280))


class Small(nn.Module):
    """A product, a convolution, an attention and a pass over memory."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.conv = nn.Linear(64, 128), nn.Conv2d(8, 16, 3, padding=1)

    def forward(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        query = self.to_q(tokens).unflatten(-1, (2, 64)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, query, query)
        return F.silu(attended.transpose(1, 2).flatten(2)), self.conv(x)


def test_work_equals_the_count_by_hand() -> None:
    with torch.device("meta"):
        network = Small().half()
        tokens, x = torch.empty(3, 10, 64).half(), torch.empty(3, 8, 5, 7).half()
    product, attention, silu, convolution, bias = work_of(network, lambda: network(tokens, x))
    assert (product.group, product.depth) == ("query, key, value", 64)
    assert product.flops == 2 * 30 * 64 * 128
    assert product.bytes == 2 * (30 * 64 + 64 * 128 + 128 + 30 * 128)
    assert attention.flops == 4 * 3 * 10 * 10 * 128
    assert (silu.group, silu.bytes) == ("passes over memory", 2 * 2 * 30 * 128)
    assert (convolution.unit, convolution.flops) == ("convolution", 2 * 3 * 35 * 72 * 16)
    assert (bias.group, bias.bytes) == ("passes over memory", 2 * 2 * 3 * 35 * 16)


def test_a_convolution_keeps_channels_last() -> None:
    """Otherwise the next operator would begin with a copy, which a GPU does not make."""
    with torch.device("meta"):
        network, x = nn.Conv2d(8, 16, 3, padding=1).half(), torch.empty(3, 8, 5, 7).half()
    for layout, copies in ((torch.channels_last, 0), (torch.contiguous_format, 1)):
        network, given = network.to(memory_format=layout), x.contiguous(memory_format=layout)  # type: ignore[call-overload]

        def call(given: Tensor = given, network: nn.Module = network) -> Tensor:
            result: Tensor = network(given)
            return result.contiguous(memory_format=torch.channels_last)

        works = [each for each in work_of(network, call) if each.unit == "memory"]
        assert len(works) == 1 + copies, f"{layout}: {len(works) - 1} beside the bias"


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory() -> None:
    rate = RATES["product", False, 16]
    arithmetic = 2e12 * (1 + rate.fill / 400) / (rate.teraflops * 1e12)
    assert seconds_of(WORK, H200) == pytest.approx(arithmetic)
    assert seconds_of(replace(WORK, bytes=43e9), H200) == pytest.approx(0.01)
    gated = replace(WORK, operations=128 * 132 * 1.7e6)
    assert seconds_of(gated, H200) == pytest.approx(arithmetic + 0.001)
    few_tiles = replace(WORK, results=(128, 128))
    assert seconds_of(few_tiles, H200) == pytest.approx(arithmetic * H200.multiprocessors)
    assert sum(seconds_by_group([WORK, WORK], H200).values()) == pytest.approx(
        2 * (arithmetic + GAP_S)
    )


def test_no_rate_exceeds_its_measurement() -> None:
    """The rates are checked at the depths and on the GPUs of their sources."""
    for unit, is_ours, bits, depth, measured in (
        ("product", False, 16, 8192, 788),
        ("product", False, 8, 5120, 1363),
        ("product", True, 8, 1280, 1125),
    ):
        rate = RATES[unit, is_ours, bits]  # type: ignore[index]
        assumed = rate.teraflops / (1 + rate.fill / depth)
        assert assumed <= measured * 1.001, f"{assumed:.0f} TFLOP/s, measured {measured}"


@pytest.mark.long
def test_an_l40s_takes_more_than_twice_the_time_of_an_h200(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "floor", "--gpu", "h200", "--rows", "2", "16", "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)["images_per_second"]
    slower = report("l40s", [16], PRECISIONS[:1])["images_per_second"]
    for name, each in slower.items():
        assert each["16"] < rates[name]["16"] / 2, name
