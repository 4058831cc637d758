"""A call's error is measured at the picture that the call predicts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engines.parity.calls import NOISE, finished_latents, record_calls, step_errors
from sdxl import schedulers
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from tests.engines.parity.test_proof import with_off

GUIDANCE = 5.0


@pytest.mark.parametrize("scheduler", ["euler", "dpmpp_2m"])
def test_the_last_call_expects_the_picture_that_comes_out(mini: Pipeline, scheduler: str) -> None:
    recorder, calls = record_calls(mini.engines, "unet_deep", "unet_shallow", "vae_decoder")
    params = GenerationParams(
        "a red circle", steps=3, guidance=GUIDANCE, scheduler=scheduler, cache_interval=1, seed=7
    )
    list(Pipeline(mini.checkpoint, recorder).generate([params]))
    *_, last, decoded = calls
    table = schedulers.table(scheduler, 3, mini.checkpoint.scheduler)
    expected, negative = finished_latents(last.inputs, last.outputs[NOISE], table)
    found = torch.lerp(negative, expected, GUIDANCE)
    inpainting = {**last.inputs, "sample": last.inputs["sample"].repeat(1, 2, 1, 1)}
    assert torch.equal(finished_latents(inpainting, last.outputs[NOISE], table)[0], expected)
    (latents,) = decoded.inputs["latents"].double()
    scale = (latents / found).median()
    assert torch.allclose(found * scale, latents, atol=0.02)


def test_wrong_noise_counts_by_how_noised_a_picture_is(mini: Pipeline) -> None:
    recorder, calls = record_calls(mini.engines, "unet_deep")
    list(
        Pipeline(mini.checkpoint, recorder).generate([GenerationParams("a ring", steps=20, seed=7)])
    )
    table = schedulers.table("euler", 20, mini.checkpoint.scheduler)
    off = with_off(mini.engines, "unet_deep", lambda rows: True)
    errors = step_errors(off, calls, table)
    first, *_, last = (error.picture for error in errors)
    assert first > 0.5 > 0.05 > last > 0
    broken = [replace(each, outputs={NOISE: each.outputs[NOISE] * math.nan}) for each in calls]
    assert [error.noise for error in errors] == pytest.approx([0.1] * len(errors))
    of_broken = step_errors(mini.engines, broken, table)
    assert all(math.isnan(error.picture) for error in of_broken)
