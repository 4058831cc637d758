"""Pictures and the language model in one service: keys, readiness, longer prompts."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from sdxl.images import read_parameters
from sdxl.places import LORAS
from serve.errors import Problem
from serve.llm.speaker import Speaker
from serve.worker.worker import Worker
from tests.serve.llm.texts import CHAT, SAID, WORDS, FakeLlm, asked_of, client, fake_speaker
from tests.serve.servers import GENERATE, error_of, file_of_keys
from tests.serve.workers import running, with_loras
from training.llm.grammar import parse

CIRCLE: list[Any] = [{"role": "user", "content": "a red circle"}]
EXPANDED = {"prompt": "circle", "expand_prompt": True, "steps": 2}


async def test_keys_and_rates_are_those_of_images(worker: Worker, tmp_path: Path) -> None:
    settings = {"keys": file_of_keys(tmp_path, k="me 2")}
    asked = [(CHAT, {"messages": CIRCLE}), (GENERATE, {"prompt": "a", "steps": 2})] * 2
    async with client(worker, fake_speaker(), "k", **settings) as http:
        statuses = [(await http.post(path, json=body)).status_code for path, body in asked]
    assert statuses == [200, 200, 429, 429]
    async with client(worker, fake_speaker(), "x", **settings) as http:
        assert (await http.post(CHAT, json={})).status_code == 401


def test_without_a_language_model_there_is_none(worker: Worker) -> None:
    assert asked_of(worker, None, CHAT, {"messages": CIRCLE}).status_code == 404
    expanded = asked_of(worker, None, GENERATE, {"prompt": "a", "expand_prompt": True})
    assert expanded.status_code == 400 and error_of(expanded)["param"] == "expand_prompt"


class Broken:
    """A TextBackend whose replica died or does not load."""

    def __init__(self, code: str) -> None:
        self.problem = Problem(503, "gone", None, code, 1.0)

    async def card(self) -> Any:
        raise self.problem

    async def generate(self, ask: Any) -> Any:
        if self.problem:
            raise self.problem
        yield

    async def metrics(self) -> list[Any]:
        return []


@pytest.mark.parametrize(("code", "ready"), [("llm_failed", 200), ("starting", 503)])
async def test_pictures_do_not_wait_for_a_failed_llm(worker: Worker, code: str, ready: int) -> None:
    picture = {"prompt": "a", "steps": 2}
    async with client(worker, Broken(code)) as http:
        answers = [
            await http.post(GENERATE, json=picture),
            await http.post(GENERATE, json={**picture, "expand_prompt": True}),
            await http.post(CHAT, json={"messages": CIRCLE}),
            *[await http.get(path) for path in ("/v1/models", "/metrics", "/readyz")],
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 503, 200, 200, ready]


async def test_a_language_model_that_was_ready_once_is_not_waited_for_again(worker: Worker) -> None:
    backend: Any = fake_speaker()
    async with client(worker, backend) as http:
        assert (await http.get("/readyz")).json()["llm"] == "ready"
        backend.card = Broken("starting").card
        assert (await http.get("/readyz")).json()["llm"] == "unavailable"


def test_a_picture_is_made_of_the_expanded_prompt(worker: Worker) -> None:
    answer = asked_of(worker, fake_speaker(), GENERATE, EXPANDED | {"n": 2}).json()
    assert [data["revised_prompt"] for data in answer["data"]] == [SAID] * 2


def test_an_expanded_prompt_keeps_the_loras_of_its_tags() -> None:
    body = EXPANDED | {"prompt": "circle <lora:hollow:0.5>"}
    with running(with_loras(LORAS)) as worker:
        (data,) = asked_of(worker, fake_speaker(), GENERATE, body).json()["data"]
    stored = read_parameters(base64.b64decode(data["b64_json"]))
    assert data["revised_prompt"] == stored["prompt"] == SAID
    assert [(each["name"], each["weight"]) for each in stored["loras"]] == [("hollow", 0.5)]


def test_a_stream_contains_the_expanded_prompt(worker: Worker) -> None:
    assert SAID in asked_of(worker, fake_speaker(), GENERATE, EXPANDED | {"stream": True}).text


def test_the_embedded_model_expands_alike_for_a_seed(worker: Worker, speaker: Speaker) -> None:
    body = EXPANDED | {"seed": 4}
    first, second = (
        asked_of(worker, speaker, GENERATE, body).json()["data"][0]["revised_prompt"]
        for _ in range(2)
    )
    scene = parse(first)
    assert first == second and scene is not None and scene.things[0].shape == "circle"


def test_a_slow_model_leaves_the_prompt_unchanged(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeLlm(token_s=1.0)
    answer = asked_of(worker, fake_speaker(engine), GENERATE, EXPANDED, expand_s=0.2).json()
    assert answer["data"][0]["revised_prompt"] == "circle" and engine.open == 0
    # The exception of a timeout has no message.
    assert "a prompt was not expanded: TimeoutError" in caplog.text


def test_an_unfinished_expansion_leaves_the_prompt_unchanged(worker: Worker) -> None:
    answer = asked_of(worker, fake_speaker(FakeLlm(WORDS * 30)), GENERATE, EXPANDED).json()
    assert answer["data"][0]["revised_prompt"] == "circle"
