"""The reported memory of an image in flight equals the loop's allocation for the image."""

from __future__ import annotations

import pytest

from eval.service.sizing import image_bytes, main, tick_costs
from tests.fakes import ARCH
from tests.sdxl.flights import loop, request

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


def test_memory_equals_that_of_an_image_in_the_loop() -> None:
    side = 64
    flight = loop()
    id_ = flight.submit(request(side=side // ARCH.vae_scale))
    flight.tick()
    tensors = flight._tensors(id_)
    flight._stage._save_caches()
    latents = [tensors.latents, tensors.estimate]
    taken = sum(t.nbytes for t in (*latents, *tensors.text, *tensors.cache))
    parts = image_bytes(ARCH, side, "float32")
    # The request is two latents wider than it is high.
    height = side // ARCH.vae_scale
    expected = parts["keys, values of text"]
    expected += (sum(parts.values()) - expected) * (height + 2) // height
    assert taken == expected


def test_costs_are_means_over_the_replicas() -> None:
    assert tick_costs(PAGE) == {("unet_deep", 2): pytest.approx(0.15)}


def test_the_table_has_the_memory_of_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "DeepCache's features      62.9 MB" in text, text
