"""LoadGen is told of first tokens and of how many came, and judges by both limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.llm import bench, under_loadgen
from eval.llm.client import AnswerTimes
from eval.llm.limits import LIMITS
from eval.llm.prompts import OWN
from eval.llm.under_loadgen import Streams
from eval.mlperf.loadgen import ScenarioRun

TOKENS = 5


class Answering:
    """In place of a client: an answer of five tokens, so many seconds between two."""

    prompts = OWN

    def __init__(self, first_s: float, token_s: float, status: int = 200) -> None:
        self.first_s, self.token_s, self.status = first_s, token_s, status
        self.http = SimpleNamespace(aclose=lambda: asyncio.sleep(0))

    async def ask(
        self, _: str, seed: int, due_s: None = None, on_first: Callable[[], None] = lambda: None
    ) -> AnswerTimes:
        heard = AnswerTimes(time.perf_counter(), status=self.status)
        if self.status == 200:
            await asyncio.sleep(self.first_s)
            heard.first_s = time.perf_counter()
            on_first()
            await asyncio.sleep(self.token_s * (TOKENS - 1))
            heard.tokens = TOKENS
        return heard


class Crowded(Answering):
    """As a service: beyond so many at once it refuses."""

    room, under_way, most = 20, 0, 0

    async def ask(self, *args: Any, **more: Any) -> AnswerTimes:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.under_way > self.room:
                await asyncio.sleep(0)
                return AnswerTimes(time.perf_counter(), status=429)
            return await super().ask(*args, **more)
        finally:
            self.under_way -= 1


def judged(folder: Path, client: Any, limits: str) -> tuple[Any, Streams]:
    system = Streams(client, 128)
    told = {"target_qps": 300.0, "benchmark": LIMITS[limits].benchmark}
    run = ScenarioRun("Server", folder, 8, is_short=True, **told)  # type: ignore[arg-type]
    try:
        return run.start(system), system
    finally:
        system.close()


@pytest.mark.parametrize(
    ("limits", "first_s", "is_valid"),
    [("server", 0.01, True), ("interactive", 0.01, True), ("interactive", 0.6, False)],
)
def test_answers_are_judged_by_the_limits(
    limits: str, first_s: float, is_valid: bool, tmp_path: Path
) -> None:
    summary, system = judged(tmp_path, Answering(first_s, 0.001), limits)
    assert summary.is_valid is is_valid, summary.lines
    assert summary.unit == "tokens/s" and summary.score > 0 and not system.failed


def test_an_answer_that_fails_is_counted_and_nothing_waits_for_it(tmp_path: Path) -> None:
    _, system = judged(tmp_path, Answering(0.0, 0.0, status=500), "server")
    assert system.failed >= 459


def test_all_samples_at_once_are_asked_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_loadgen, "AGAIN_S", 0.001)
    client: Any = Crowded(0.001, 0.0005)
    client.prompts = [OWN[0]] * 200
    system = Streams(client, 30)
    run = ScenarioRun("Offline", tmp_path, 200, is_short=True, benchmark=LIMITS["server"].benchmark)
    try:
        summary = run.start(system)
    finally:
        system.close()
    assert summary.is_valid and not system.failed, (system.failed, summary.lines)
    assert Crowded.room < client.most <= 30


def test_what_is_refused_without_end_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_loadgen, "AGAIN_S", 0.001)
    monkeypatch.setattr(under_loadgen, "PATIENCE_S", 0.01)
    _, system = judged(tmp_path, Answering(0.0, 0.0, status=429), "server")
    assert system.failed >= 459


@pytest.mark.parametrize(("is_valid", "code"), [(True, 0), (False, 1)])
def test_a_run_that_is_not_valid_ends_with_1(
    is_valid: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"LoadGen, llama2-70b Offline": {"valid": is_valid}}
    monkeypatch.setattr(bench, "measure", lambda *_: found)
    assert bench.main(["--url", "http://service", "--loadgen", "Offline", "--json"]) == code
