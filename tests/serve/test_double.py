"""The double of SDXL reads every input, and a backend without a function is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import engines
from sdxl.engine import call
from sdxl.params import InvalidParams
from sdxl.specs import SDXL_1_0
from tests.serve import double


def test_every_input_of_the_unet_changes_its_output(tmp_path: Path) -> None:
    folder = double.write(tmp_path / "sdxl", speed=1e6)
    pipeline = engines.load(str(folder), double.BACKEND)
    engine = pipeline.engines["unet_deep"]
    axes = {"rows": 2, "tokens": 77, "latent_h": 16, "latent_w": 16}
    inputs = {
        t.name: torch.ones(t.shape(axes)).to(getattr(torch, t.dtype)) for t in engine.spec.inputs
    }
    plain = call(engine, SDXL_1_0, inputs)["noise"].clone()
    for name in ("sample", "timestep", "added", "keys_0", "values_69"):
        changed = {k: v.clone() for k, v in inputs.items()}
        changed[name][1] *= 50
        noise = call(engine, SDXL_1_0, changed)["noise"]
        assert torch.equal(noise[0], plain[0]) and not torch.equal(noise[1], plain[1]), name


@pytest.mark.parametrize("backend", ["no.such:load", ":", "tests.fakes:", "tests.fakes:nothing"])
def test_a_backend_that_names_no_function_is_refused(backend: str) -> None:
    with pytest.raises(InvalidParams, match="must be package.module:function"):
        engines.load("mini", backend)
