"""Answers as large as real pictures make them, through proxy, front and replica."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from sdxl.images import read_parameters
from tests.serve.servers import GENERATE
from tests.serve.test_api import events_of, picture

RAY_DEFAULT = 4 << 20
"""bytes between two of Ray's processes, unless its environment allows more"""
NOISE: dict[str, Any] = {
    "prompt": "noise",
    "n": 10,
    "size": "512x512",
    "steps": 1,
    "guidance_scale": 20,
    "seed": 1,
    "deadline_s": 100,
}
"""What the embedded model makes of so much guidance hardly gets smaller as a PNG."""

pytestmark = pytest.mark.timeout(600)


def test_ten_noisy_pictures_fit_into_one_answer(http: httpx.Client) -> None:
    answer = http.post(GENERATE, json=NOISE)
    assert answer.status_code == 200, answer.text[:300]
    assert len(answer.content) > RAY_DEFAULT, "the pictures are too small to show anything"
    seeds = [read_parameters(picture(data))["seed"] for data in answer.json()["data"]]
    assert seeds == list(range(1, 11))


def test_a_stream_of_noisy_pictures_arrives_whole(http: httpx.Client) -> None:
    body = {**NOISE, "steps": 4, "stream": True, "partial_images": 3}
    with http.stream("POST", GENERATE, json=body) as answer:
        text = "".join(answer.iter_text())
    events = events_of(text)
    assert answer.status_code == 200 and len(text) > RAY_DEFAULT
    done = [event for event in events if event["type"].endswith("completed")]
    assert sorted(read_parameters(picture(event))["seed"] for event in done) == list(range(1, 11))
    assert sum(event["type"].endswith("partial_image") for event in events) == 30
