"""LoadGen receives first tokens and token counts, and applies both limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eval.llm import bench, under_loadgen
from eval.llm.client import LIMITS, PROMPTS, StreamedAnswer
from eval.llm.under_loadgen import Streams
from eval.mlperf.loadgen import ScenarioRun

TOKENS = 5


class Answering:
    """A fake client: answers of five tokens, `token_s` apart."""

    prompts = PROMPTS

    def __init__(self, first_s: float, token_s: float, status: int = 200) -> None:
        self.first_s, self.token_s, self.status = first_s, token_s, status
        self.http = SimpleNamespace(aclose=lambda: asyncio.sleep(0))

    async def request(
        self, _: str, seed: int, due_s: None = None, on_first: Callable[[], None] = lambda: None
    ) -> StreamedAnswer:
        answer = StreamedAnswer(time.perf_counter(), status=self.status)
        if self.status == 200:
            await asyncio.sleep(self.first_s)
            answer.first_s = time.perf_counter()
            on_first()
            await asyncio.sleep(self.token_s * (TOKENS - 1))
            answer.tokens = TOKENS
        return answer


class Crowded(Answering):
    """Refuses more than `room` concurrent requests, as a service does."""

    room, under_way, most = 20, 0, 0

    async def request(self, *args: Any, **more: Any) -> StreamedAnswer:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.under_way > self.room:
                await asyncio.sleep(0)
                return StreamedAnswer(time.perf_counter(), status=429)
            return await super().request(*args, **more)
        finally:
            self.under_way -= 1


def run_loadgen(
    folder: Path, client: Any, limits: str, scenario: str = "Server", at_once: int = 128
) -> tuple[Any, Streams]:
    system, count = Streams(client, at_once), len(client.prompts)
    benchmark = LIMITS[limits].benchmark
    run = ScenarioRun(scenario, folder, count, target_qps=300, is_short=True, benchmark=benchmark)
    try:
        return run.start(system.issue), system
    finally:
        system.close()


@pytest.mark.parametrize(("limits", "is_valid"), [("server", True), ("interactive", False)])
def test_a_run_is_valid_within_the_limits(limits: str, is_valid: bool, tmp_path: Path) -> None:
    summary, system = run_loadgen(tmp_path, Answering(0.6, 0.001), limits)
    assert summary.is_valid is is_valid, summary.lines
    assert summary.unit == "tokens/s" and summary.score > 0 and not system.failed


@pytest.mark.parametrize("status", [500, 429])
def test_failed_and_always_refused_answers_are_counted(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_loadgen, "RETRY_S", 0.001)
    monkeypatch.setattr(under_loadgen, "GIVE_UP_S", 0.01)
    _, system = run_loadgen(tmp_path, Answering(0.0, 0.0, status), "server")
    assert system.failed >= 459


def test_offline_samples_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_loadgen, "RETRY_S", 0.001)
    client: Any = Crowded(0.001, 0.0005)
    client.prompts = [PROMPTS[0]] * 200
    summary, system = run_loadgen(tmp_path, client, "server", "Offline", at_once=30)
    assert summary.is_valid and not system.failed, (system.failed, summary.lines)
    assert Crowded.room < client.most <= 30


@pytest.mark.parametrize(("is_valid", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_of_an_invalid_run_is_1(
    is_valid: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"LoadGen, llama2-70b Offline": {"valid": is_valid}}
    monkeypatch.setattr(bench, "measure", lambda *_: runs)
    assert bench.main(["--url", "http://service", "--loadgen", "Offline", "--json"]) == code
