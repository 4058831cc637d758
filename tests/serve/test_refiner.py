"""A refiner in the service, for stable-diffusion-webui's clients, and in `sdxl render`."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines
from sdxl import cli
from sdxl.images import read_parameters, to_pixels
from sdxl.infotext import parameters_text, read_text
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from serve.worker.worker import Worker
from tests.serve import workers
from tests.serve.servers import call, error_of, post
from tests.serve.test_controls import QUICK
from tests.serve.test_edits import picture_in, pixels

FIELDS: dict[str, Any] = {"steps": 4, "seed": 7, "refiner": "small", "refiner_switch_at": 0.5}


@pytest.fixture(scope="module")
def model(small_refiner: Path) -> Pipeline:
    return engines.load("mini", "torch", refiner=str(small_refiner))


@pytest.fixture(scope="module")
def refining(model: Pipeline) -> Iterator[Worker]:
    with workers.running(model) as found:
        yield found


def drawn(model: Pipeline, **fields: Any) -> Any:
    params = GenerationParams("a red circle", width=128, height=128, **{**FIELDS, **fields})
    (result,) = model.generate([params])
    assert result.image is not None, result.error
    return to_pixels(result.image)


@pytest.mark.slow
def test_a_request_is_refined_as_in_the_pipeline(refining: Worker) -> None:
    file = picture_in(post(refining, {**QUICK, **FIELDS}))
    assert np.abs(drawn(refining.pipeline).astype(int) - pixels(file)).max() < 2
    stored = read_parameters(file)
    assert (stored["refiner"], stored["refiner_switch_at"]) == ("small", 0.5)
    plain = picture_in(post(refining, {**QUICK, "steps": 4, "seed": 7}))
    assert np.abs(pixels(plain).astype(int) - pixels(file)).max() > 20
    assert "refiner" not in read_parameters(plain)


def test_models_are_listed_with_their_refiner(refining: Worker) -> None:
    assert call(refining, "GET", "/v1/models").json()["data"][0]["images"]["refiner"] == "small"


def test_the_warm_up_measures_the_calls_of_both_models(refining: Worker) -> None:
    loop = refining._started().denoiser.loop
    found = {(k.call.network, k.bucket, k.call.is_refined) for k in loop.costs.lasting}
    buckets = refining.pipeline.limits().buckets
    networks = "unet_deep", "unet_shallow"
    assert found == {*itertools.product(networks, buckets, (False, True))}


def test_another_refiner_is_refused(refining: Worker, worker: Worker) -> None:
    """A name is never taken for a path."""
    must = "refiner must be small, got "
    paths = [(refining, name, must) for name in ("elsewhere/small", "\0", "x" * 300 + "/small")]
    missing = (worker, "small", "no refiner is loaded")
    for asked, name, words in ((refining, "sd_xl_refiner_1.0", must), *paths, missing):
        answer = post(asked, {**QUICK, "refiner": name})
        assert (answer.status_code, error_of(answer)["param"]) == (400, "refiner")
        assert words in error_of(answer)["message"]


@pytest.mark.parametrize("name", ["small", "small.safetensors", "small [7440042bbd]"])
def test_webui_s_refiner_is_the_same(refining: Worker, name: str) -> None:
    body = {"prompt": "a red circle", "steps": 4, "seed": 7, "width": 128, "height": 128}
    body |= {"cfg_scale": 5, "sampler_name": "Euler"}
    asked = {**body, "refiner_checkpoint": name, "refiner_switch_at": 0.5}
    answer = post(refining, asked, "/sdapi/v1/txt2img", sdapi=True)
    assert answer.status_code == 200, answer.text[:300]
    found = pixels(base64.b64decode(answer.json()["images"][0]))
    assert np.abs(drawn(refining.pipeline).astype(int) - found).max() < 2
    (text,) = json.loads(answer.json()["info"])["infotexts"]
    assert "Refiner: small, Refiner switch at: 0.5" in text
    unset = {**body, "refiner_checkpoint": "None", "refiner_switch_at": 0.8}
    assert post(refining, unset, "/sdapi/v1/txt2img", sdapi=True).status_code == 200


def test_the_parameters_text_is_read_back() -> None:
    params = GenerationParams("a ring", width=64, height=64, **FIELDS)
    assert read_text(parameters_text(params.as_dict())).params.items() >= FIELDS.items()
    theirs = "a ring\nSteps: 4, Seed: 7, Size: 64x64, Refiner: small [7440042bbd], "
    found = read_text(theirs + "Refiner switch at: 0.5")
    assert found.params.items() >= FIELDS.items() and not found.unread


def test_render_loads_the_refiner_that_it_names(small_refiner: Path, tmp_path: Path) -> None:
    flags = ["--refiner", str(small_refiner), "--refiner-switch-at", "0.5"]
    flags += ["--steps", "4", "--seed", "7"]
    size = ["--width", "128", "--height", "128", "--backend", "torch"]
    out = tmp_path / "a.png"
    assert cli.main(["render", "a red circle", *flags, *size, "--out", str(out)]) == 0
    assert read_parameters(out.read_bytes())["refiner"] == "small"
