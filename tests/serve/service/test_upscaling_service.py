"""Upscaled pictures through the whole service: fronts, replicas and Ray between them."""

from __future__ import annotations

import base64
import io
import itertools
from typing import Any

import httpx
import pytest
from PIL import Image

from sdxl.images import read_parameters
from tests.sdxl.test_source import saved
from tests.serve.servers import GENERATE
from tests.serve.test_api import events_of, picture

PROMPT = "a red circle on a blue background"
ASKED: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "steps": 4, "cache_interval": 2, "n": 2}
ASKED |= {"upscale": 1.5, "upscale_strength": 0.5}
ALL_STEPS = 4 + 2

pytestmark = pytest.mark.timeout(120)


def check(file: bytes, size: tuple[int, int], **expected: object) -> None:
    with Image.open(io.BytesIO(file)) as image:
        image.load()
        assert image.size == size
    assert read_parameters(file).items() >= {"prompt": PROMPT, **expected}.items()


def test_two_pictures_are_upscaled_in_one_answer(http: httpx.Client) -> None:
    answer = http.post(GENERATE, json=ASKED)
    assert answer.status_code == 200, answer.text[:500]
    body = answer.json()
    assert body["size"] == "192x192"
    for seed, data in enumerate(body["data"], ASKED["seed"]):
        assert data["deep_steps"] + data["shallow_steps"] == ALL_STEPS
        check(picture(data), (192, 192), seed=seed, upscale=1.5, upscaler="lanczos")


def test_a_stream_goes_through_both_legs(http: httpx.Client) -> None:
    asked = {**ASKED, "stream": True, "partial_images": 2, "progress": True}
    with http.stream("POST", GENERATE, json=asked) as answer:
        events = events_of("".join(answer.iter_text()))
    kinds = [event["type"].rpartition(".")[2] for event in events]
    assert kinds.count("completed") == 2 and kinds.count("partial_image") == 4
    for event, kind in zip(events, kinds, strict=True):
        if kind == "progress":
            assert event["steps"] == ALL_STEPS
        else:
            check(picture(event), (192, 192), upscale=1.5)
    # A preview takes a while to make: it may come after the next step's progress.
    for index, kind in itertools.product(range(2), ("progress", "partial_image")):
        pairs = zip(events, kinds, strict=True)
        steps = [e["step"] for e, k in pairs if k == kind and e["image_index"] == index]
        assert steps == sorted(steps) and steps[-1] >= ASKED["steps"], (kind, steps)


def test_a_picture_that_exists_is_upscaled(http: httpx.Client) -> None:
    files = {"image": saved(Image.linear_gradient("L").resize((96, 64)).convert("RGB"))}
    fields = {"prompt": PROMPT, "steps": "5", "seed": "7", "upscale": "2", "n": "2"}
    answer = http.post("/v1/images/edits", data=fields, files=files)
    assert answer.status_code == 200, answer.text[:500]
    for seed, data in enumerate(answer.json()["data"], 7):
        check(picture(data), (192, 128), seed=seed, strength=0.4)


def test_the_webuis_hires_fix_comes_through(http: httpx.Client) -> None:
    asked = {"prompt": PROMPT, "steps": 4, "seed": 3, "width": 64, "height": 96, "batch_size": 2}
    second = {"enable_hr": True, "hr_scale": 2, "hr_upscaler": "Lanczos"}
    answer = http.post("/sdapi/v1/txt2img", json={**asked, **second, "denoising_strength": 0.5})
    assert answer.status_code == 200, answer.text[:500]
    images = answer.json()["images"]
    assert len(images) == 2
    for seed, image in enumerate(images, 3):
        check(base64.b64decode(image), (128, 192), seed=seed, upscale=2.0, upscale_strength=0.5)
