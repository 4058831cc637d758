"""Language model replicas that die: the client reads one answer, and each word once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from sdxl.fleet import Loads
from serve import errors
from serve.errors import Problem
from serve.fleet.autoscaling import BUSY
from serve.fleet.replicas import ATTEMPTS
from serve.fleet.router import REPORTED
from serve.llm.replica import LlmReplica
from serve.llm.replicas import LlmReplicas
from serve.llm.text_orders import Accepted, Delta, Ended, LlmCard, Update
from serve.settings import ServeSettings
from tests.serve.llm.texts import CIRCLE, FakeLlm, fake_speaker, text_of
from tests.serve.test_replicas import Handle

DIED = ActorDiedError()
CARD = LlmCard("m", 512)
WHOLE: list[Any] = [Accepted(3), Delta("a red"), Delta(" circle"), Ended("stop", 3, 3)]


def full_engine() -> FakeLlm:
    engine = FakeLlm()
    engine.rows = engine.open = 2000
    engine.waiting = 50
    return engine


def replica_with(speaker: Any) -> LlmReplica:
    replica = LlmReplica.__new__(LlmReplica)
    replica.speaker = speaker
    return replica


def updates_of(*scripts: Sequence[Any]) -> list[Update]:
    async def scenario() -> list[Update]:
        async with aclosing(LlmReplicas(Handle(*scripts)).generate(CIRCLE)) as updates:
            return [update async for update in updates]

    return asyncio.run(scenario())


def test_an_answer_passes_as_it_comes() -> None:
    assert updates_of(WHOLE) == WHOLE


@pytest.mark.parametrize("loss", [DIED, errors.draining(), errors.starting()])
@pytest.mark.parametrize("sent", range(3))
def test_another_replica_continues_the_text_of_a_lost_one(loss: Exception, sent: int) -> None:
    updates = updates_of([*WHOLE[:sent], loss], WHOLE)
    assert text_of(updates) == "a red circle" and updates[-1] == WHOLE[-1]
    assert sum(isinstance(update, Accepted) for update in updates) == 1


def test_the_second_replica_may_split_the_text_differently() -> None:
    again = [Accepted(3), Delta("a"), Delta(" red cir"), Delta("cle"), Ended("stop", 3, 3)]
    assert text_of(updates_of([*WHOLE[:2], DIED], again)) == "a red circle"


LOST: dict[str, tuple[list[Sequence[Any]], int, str]] = {
    "shorter text": ([[*WHOLE[:3], DIED], [Accepted(3), Delta("a red"), WHOLE[-1]]], 503, ""),
    "another text": ([[*WHOLE[:2], DIED], [Accepted(3), Delta("two stars")]], 503, ""),
    "many dead": ([[DIED]] * ATTEMPTS, 503, ""),
    "all loading": ([[errors.starting()]] * ATTEMPTS, 503, "still loading"),
    "refusal": ([[Problem(400, "too long")]], 400, "too long"),
}


@pytest.mark.parametrize(("scripts", "status", "words"), LOST.values(), ids=LOST)
def test_what_cannot_be_continued_is_one_problem(
    scripts: list[Sequence[Any]], status: int, words: str
) -> None:
    with pytest.raises(Problem) as caught:
        updates_of(*scripts)
    assert caught.value.status == status and words in str(caught.value)


async def test_a_replica_s_problem_is_raised_and_the_card_is_asked_for_again() -> None:
    failed = Problem(503, "does not load", None, "llm_failed")
    replicas = LlmReplicas(Handle([failed], [CARD]))
    with pytest.raises(Problem, match="does not load"):
        await replicas.card()
    assert await replicas.card() == CARD


async def test_a_loading_replica_is_asked_last() -> None:
    async def outlook(speaker: Any) -> float:
        stats = await replica_with(speaker).record_routing_stats()
        loads = Loads(1)
        loads.report(0, 0.0, [stats[name] for name in REPORTED], included=-100)
        return float(loads.ready(0, 0.0))

    assert await outlook(fake_speaker(full_engine())) == 2150 < await outlook(None)


async def test_only_a_queue_asks_for_more_replicas() -> None:
    for speaker, busy in ((fake_speaker(full_engine()), 2050 / 2000), (None, 0)):
        assert (await replica_with(speaker).record_autoscaling_stats())[BUSY] == busy


async def test_it_warms_up_in_the_loop_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM keeps the event loop of its first request for its statistics."""
    loops: list[Any] = []

    class Warming:
        id = "m"
        engine = SimpleNamespace(close=lambda: None)

        async def warm_up(self) -> None:
            loops.append(asyncio.get_running_loop())

    monkeypatch.setattr("serve.llm.replica.load", lambda settings: Warming())
    replica = LlmReplica(ServeSettings())
    async with asyncio.timeout(10):
        while replica.speaker is None:
            await asyncio.sleep(0.01)
    assert loops == [asyncio.get_running_loop()]
