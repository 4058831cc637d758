"""The identity of sources, and the requests to a service."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from eval.quality import sources
from eval.quality.accuracy_log import FILE, AccuracyLog
from eval.quality.evaluation import save
from eval.quality.sources import (
    AT_ONCE,
    Folder,
    NoPicture,
    Service,
    concurrent_pictures,
    first_image_model,
    request_picture,
)
from eval.quality.task import QualityTask
from sdxl.params import GenerationParams
from tests.eval.conftest import Noise


@pytest.fixture
def few(task: QualityTask) -> QualityTask:
    return replace(task, captions=task.captions[:2], requests=task.requests[:2])


def write_log(folder: Path, value: int, side: int) -> None:
    data = (bytes([value]) * 3 * side**2).hex()
    lines = [json.dumps({"qsl_idx": i, "data": data}) for i in range(2)]
    (folder / FILE).write_text("\n".join(lines))


@pytest.mark.parametrize("kind", ["log", "pictures"])
def test_rewritten_files_are_another_source(kind: str, few: QualityTask, tmp_path: Path) -> None:
    described = []
    for value in (0, 2):
        if kind == "log":
            write_log(tmp_path, value, few.side)
        else:
            save(tmp_path, range(2), Noise().pictures(range(value, value + 2)))
        for _ in range(2):
            log = tmp_path / FILE
            source = AccuracyLog(log, few) if kind == "log" else Folder(tmp_path, few)
            described.append(source.describe())
    assert described[0] == described[1] != described[2] == described[3]


def test_a_service_with_another_model_or_precision_is_another_source(
    few: QualityTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(name: str, precision: str) -> dict[str, Any]:
        engines = {"backend": "torch", "precision": precision, "passed_over": {"tensorrt": "?"}}
        answer = {"data": [{"id": name, "images": {"at_once": 4}, "engines": engines}]}
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
        with httpx.Client(base_url="http://service", transport=transport) as http:
            model = first_image_model(http)
        monkeypatch.setattr(sources, "first_image_model", lambda _: model)
        return Service("http://service", few.requests).describe()

    models = ("a", "fp16"), ("a", "int8"), ("b", "int8"), ("a", "fp16")
    described = [describe(*each) for each in models]
    assert described[0] == described[3] and len({str(each) for each in described}) == 3, described


def test_endless_refusals_raise_with_the_services_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PICTURE_S", 0.1)
    requests: list[httpx.Request] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        assert len(requests) < 100, "it never gives up"
        text = "Refused: ready in 180.00 s, the deadline is in 120.00 s."
        return httpx.Response(429, headers={"retry-after": "0.02"}, text=text)

    transport = httpx.MockTransport(refuse)
    with (
        httpx.Client(base_url="http://service", transport=transport) as http,
        pytest.raises(NoPicture, match="answered 429: Refused: ready in 180.00 s"),
    ):
        request_picture(http, GenerationParams("a ring"))
    assert len(requests) > 1


@pytest.mark.parametrize(
    ("status", "models", "needed"),
    [
        (200, [{"id": "sdxl", "images": {"at_once": 128}}], 128),
        (200, [{"id": "llm"}, {"id": "sdxl", "images": {"at_once": 24}}], 24),
        (200, [{"id": "sdxl", "images": {"at_once": 0}}], AT_ONCE),
        (200, [{"id": "another"}], AT_ONCE),
        (404, [], AT_ONCE),
    ],
)
def test_concurrency_is_what_the_service_publishes(
    status: int, models: list[dict[str, Any]], needed: int
) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json={"data": models}))
    with httpx.Client(base_url="http://service", transport=transport) as http:
        assert concurrent_pictures(first_image_model(http)) == needed
