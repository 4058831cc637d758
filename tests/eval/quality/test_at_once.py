"""A service is asked for as many pictures at once as it says it takes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from eval.quality.sources import AT_ONCE, at_once, image_model


@pytest.mark.parametrize(
    ("models", "needed"),
    [
        ({"data": [{"id": "sdxl", "images": {"at_once": 128}}]}, 128),
        ({"data": [{"id": "llm"}, {"id": "sdxl", "images": {"at_once": 24}}]}, 24),
        ({"data": [{"id": "sdxl", "images": {"at_once": 0}}]}, AT_ONCE),
        ({"data": [{"id": "another"}]}, AT_ONCE),
    ],
)
def test_the_service_says_how_many(models: dict[str, Any], needed: int) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=models))
    with httpx.Client(base_url="http://service", transport=transport) as http:
        assert at_once(image_model(http)) == needed


def test_one_that_does_not_say_gets_a_few() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(404))
    with httpx.Client(base_url="http://service", transport=transport) as http:
        assert at_once(image_model(http)) == AT_ONCE
