"""The arithmetic derived from the networks equals the published arithmetic."""

from __future__ import annotations

import pytest

from eval.measuring.arithmetic import (
    FULL_SIZE,
    CallWork,
    Shapes,
    calls_a_picture,
    configs_of,
    work_of,
)
from eval.measuring.ceilings import Ceilings
from tests.tools import ROOT

TERA = 1e12
CACHED = 2 * 128 * 128 * (9 + 1) * 960 * 320 / 1e12
"""a row's first convolution and shortcut of the last up block, which the deep step caches"""
PUBLISHED = {"unet_deep": 2 * 6.761, "unet_shallow": 2 * (0.326 - CACHED), "vae_decoder": 10.47}
"""TFLOP at 1024×1024, two rows, one picture (MLPerf's reference model, counted by its layers)"""


@pytest.fixture(scope="module")
def full() -> dict[str, CallWork]:
    return work_of(configs_of(FULL_SIZE), Shapes(1024, 2), "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_full_size_networks_have_the_published_arithmetic(
    name: str, full: dict[str, CallWork]
) -> None:
    teraflops = full[name].flops / TERA
    assert teraflops == pytest.approx(PUBLISHED[name], rel=0.02)


def test_docs_gpus_has_the_floors_of_this_arithmetic(full: dict[str, CallWork]) -> None:
    halves, eight = [], []
    for deep in (20, 10):
        counts = calls_a_picture(deep, 20 - deep)
        work = {name: count * full[name].flops / TERA for name, count in counts.items()}
        steps = work["unet_deep"] + work["unet_shallow"]
        rest = sum(work.values()) - steps
        halves.append(f"{1000 * (steps + rest) / 790:.0f}")
        eight.append(f"{1000 * (steps / 1979 + rest / 790):.0f}")
    page = " ".join((ROOT / "docs" / "gpus.md").read_text().split())
    assert f"{' and '.join(halves)} ms in fp16 at 790 TFLOP/s" in page, halves
    assert f"{' and '.join(eight)} ms with the steps in 8 bits at 1979" in page, eight


def test_weights_have_the_bytes_of_their_precision(full: dict[str, CallWork]) -> None:
    whole = full["unet_prompt"].weight_bytes + full["unet_deep"].weight_bytes
    assert whole == pytest.approx(2 * 2.567e9, rel=0.01)
    assert full["unet_prompt"].weight_bytes == pytest.approx(0.135 * whole, rel=0.01)


@pytest.mark.slow
def test_8_bit_weights_take_half_the_bytes() -> None:
    configs = configs_of("mini")
    half, eight = (
        work_of(configs, Shapes(128, 2), precision)["unet_deep"].weight_bytes
        for precision in ("fp16", "int8")
    )
    assert 0.5 * half < eight < 0.51 * half, (half, eight)


def test_the_floor_is_the_longer_of_arithmetic_and_memory() -> None:
    ceilings = Ceilings(flops=100.0, bytes=10.0)
    assert ceilings.floor_s(200, 5) == 2
    assert ceilings.floor_s(200, 50) == 5
