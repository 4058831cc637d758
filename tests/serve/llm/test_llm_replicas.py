"""Asks to replicas that die: the client reads one answer, each word of it once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from serve import errors
from serve.errors import Problem
from serve.fleet.autoscaling import BUSY
from serve.fleet.replicas import ATTEMPTS
from serve.fleet.router import ready_in_s
from serve.llm.asks import Delta, Ended, LlmCard, Taken, Update
from serve.llm.engine import Occupancy
from serve.llm.replica import LlmReplica
from serve.llm.replicas import LlmReplicas
from serve.settings import ServeSettings
from tests.serve.llm.texts import CIRCLE, text_of
from tests.serve.test_replicas import Handle

DIED = ActorDiedError()
CARD = LlmCard("m", 512)
WHOLE: list[Any] = [Taken(3), Delta("a red"), Delta(" circle"), Ended("stop", 3, 3)]


class Engine:
    """A full one, for which some wait."""

    rows = 2000

    async def occupancy(self) -> Occupancy:
        return Occupancy(2000, 50, 1.0)

    def check_health(self) -> None:
        pass

    def close(self) -> None:
        pass


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
@pytest.mark.parametrize("told", range(3))
def test_what_a_lost_replica_was_saying_is_said_on_elsewhere(loss: Exception, told: int) -> None:
    updates = updates_of([*WHOLE[:told], loss], WHOLE)
    assert text_of(updates) == "a red circle" and updates[-1] == WHOLE[-1]
    assert sum(isinstance(update, Taken) for update in updates) == 1


def test_pieces_may_lie_differently_the_second_time() -> None:
    again = [Taken(3), Delta("a"), Delta(" red cir"), Delta("cle"), Ended("stop", 3, 3)]
    assert text_of(updates_of([*WHOLE[:2], DIED], again)) == "a red circle"


def test_a_text_that_ends_sooner_the_second_time_is_lost_not_cut() -> None:
    shorter = [Taken(3), Delta("a red"), Ended("stop", 3, 2)]
    with pytest.raises(Problem) as caught:
        updates_of([*WHOLE[:3], DIED], shorter)
    assert caught.value.status == 503


def test_another_text_is_not_glued_to_the_first() -> None:
    with pytest.raises(Problem) as caught:
        updates_of([*WHOLE[:2], DIED], [Taken(3), Delta("two stars")])
    assert caught.value.status == 503


def test_it_gives_up_after_a_few() -> None:
    with pytest.raises(Problem) as caught:
        updates_of(*[[DIED]] * ATTEMPTS)
    assert caught.value.status == 503


def test_one_that_still_loads_says_so() -> None:
    with pytest.raises(Problem, match="still loading"):
        updates_of(*[[errors.starting()]] * ATTEMPTS)


def test_a_refusal_is_not_tried_elsewhere() -> None:
    with pytest.raises(Problem) as caught:
        updates_of([Problem(400, "too long")])
    assert caught.value.status == 400


def test_a_replica_s_problem_is_raised_and_the_card_is_asked_for_again() -> None:
    failed = Problem(503, "does not load", None, "llm_failed")
    replicas = LlmReplicas(Handle([failed], [CARD]))
    with pytest.raises(Problem, match="does not load"):
        asyncio.run(replicas.card())
    assert asyncio.run(replicas.card()) == CARD


def test_who_has_not_loaded_is_asked_last() -> None:
    async def outlook(speaker: Any) -> float:
        stats = await replica_with(speaker).record_routing_stats()
        return ready_in_s(stats, deque([stats["at_s"] + 1] * 100), stats["at_s"])

    busy = asyncio.run(outlook(SimpleNamespace(engine=Engine())))
    assert busy == 2150 < asyncio.run(outlook(None))


def test_who_waits_asks_for_more_replicas_and_who_loads_for_none() -> None:
    def busy(speaker: Any) -> float:
        return asyncio.run(replica_with(speaker).record_autoscaling_stats())[BUSY]

    assert busy(SimpleNamespace(engine=Engine())) == 2050 / 2000
    assert busy(None) == 0


async def test_it_warms_up_in_the_loop_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM keeps to the loop of its first request: its numbers would come to one that has
    ended."""
    loops: list[Any] = []

    class Warming:
        id = "m"
        engine = SimpleNamespace(close=lambda: None)

        async def warm_up(self) -> None:
            loops.append(asyncio.get_running_loop())

    monkeypatch.setattr("serve.llm.loading.load", lambda settings: Warming())
    replica = LlmReplica(ServeSettings())
    async with asyncio.timeout(10):
        while replica.speaker is None:
            await asyncio.sleep(0.01)
    assert loops == [asyncio.get_running_loop()]
