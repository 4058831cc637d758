"""A source says what tells it from another, and a service that refuses for ever is given up."""

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
from eval.quality.sources import Folder, NoPicture, Service, ask, image_model
from eval.quality.task import QualityTask
from sdxl.params import GenerationParams
from tests.eval.conftest import Noise


@pytest.fixture
def few(task: QualityTask) -> QualityTask:
    return replace(task, captions=task.captions[:2], requests=task.requests[:2])


def test_a_log_that_is_written_anew_is_another_source(few: QualityTask, tmp_path: Path) -> None:
    found = []
    for precision in (b"\1", b"\2"):
        data = (precision * 3 * few.side**2).hex()
        lines = [json.dumps({"qsl_idx": i, "data": data}) for i in range(2)]
        (tmp_path / FILE).write_text("\n".join(lines))
        found.append(AccuracyLog(tmp_path / FILE, few).describe())
    assert found[0] != found[1]
    assert AccuracyLog(tmp_path / FILE, few).describe() == found[1]


def test_pictures_that_are_made_anew_are_another_source(few: QualityTask, tmp_path: Path) -> None:
    found = []
    for first in (0, 2):
        save(tmp_path, range(2), Noise().pictures(range(first, first + 2)))
        found.append(Folder(tmp_path, few).describe())
    assert found[0] != found[1]
    assert Folder(tmp_path, few).describe() == found[1]


def test_a_service_with_another_model_or_precision_is_another_source(
    few: QualityTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(name: str, precision: str) -> dict[str, Any]:
        engines = {"backend": "torch", "precision": precision, "passed_over": {"tensorrt": "?"}}
        answer = {"data": [{"id": name, "images": {"at_once": 4}, "engines": engines}]}
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
        with httpx.Client(base_url="http://service", transport=transport) as http:
            model = image_model(http)
        monkeypatch.setattr(sources, "image_model", lambda _: model)
        return Service("http://service", few.requests).describe()

    found = [told(*each) for each in (("a", "fp16"), ("a", "int8"), ("b", "int8"), ("a", "fp16"))]
    assert found[0] == found[3] and len({str(each) for each in found}) == 3, found


def test_refusals_without_end_are_told_in_the_services_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "TIMEOUT_S", 0.1)
    asked: list[httpx.Request] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        assert len(asked) < 100, "it asks for ever"
        text = "Refused: ready in 180.00 s, the deadline is in 120.00 s."
        return httpx.Response(429, headers={"retry-after": "0.02"}, text=text)

    transport = httpx.MockTransport(refuse)
    with (
        httpx.Client(base_url="http://service", transport=transport) as http,
        pytest.raises(NoPicture, match="answered 429: Refused: ready in 180.00 s"),
    ):
        ask(http, GenerationParams("a ring"))
    assert len(asked) > 1
