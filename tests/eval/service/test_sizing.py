"""The reported memory of an image in flight equals the loop's."""

from __future__ import annotations

import pytest
import torch

from eval.service.sizing import image_bytes, main, tick_costs
from sdxl.cohort import BufferPool, NewImage
from tests.fakes import ARCH, axes, fake_conditioning, fake_engines

PAGE = """\
# TYPE sdxl_tick_seconds histogram
sdxl_tick_seconds_bucket{network="unet_deep",bucket="2",replica="a",le="+Inf"} 10
sdxl_tick_seconds_sum{network="unet_deep",bucket="2",replica="a"} 1.0
sdxl_tick_seconds_count{network="unet_deep",bucket="2",replica="a"} 10
sdxl_tick_seconds_sum{network="unet_deep",bucket="2",replica="b"} 2.0
sdxl_tick_seconds_count{network="unet_deep",bucket="2",replica="b"} 10
sdxl_tick_seconds_sum{network="unet_shallow",bucket="4",replica="a"} 0
sdxl_tick_seconds_count{network="unet_shallow",bucket="4",replica="a"} 0
"""


def test_memory_equals_the_loops_buffers() -> None:
    side, pool = 64, BufferPool(fake_engines())
    latent = side // ARCH.vae_scale
    conditioning = fake_conditioning(0, rows=2)
    start = torch.zeros(ARCH.latent_channels, latent, latent)
    buffers = pool.begin(
        axes(latent, latent), [NewImage(conditioning, 5.0, start)], 2, runs=True
    ).buffers
    tensors = [*buffers.by_name.values(), buffers.latents, buffers.estimate]
    taken = sum(tensor.nbytes for tensor in tensors)
    reported = sum(image_bytes(ARCH, side, "float32").values())
    # Two rows have room for two images without guidance.
    room = buffers.latents.nbytes + buffers.estimate.nbytes
    assert reported == pytest.approx(taken - room / 2, rel=1e-9), f"{reported}, takes {taken}"


def test_costs_are_means_over_the_replicas() -> None:
    assert tick_costs(PAGE) == {("unet_deep", 2): pytest.approx(0.15)}


def test_the_table_has_the_memory_of_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "DeepCache's features      62.9 MB" in text, text
