"""Requests to a speaker: each ends with its text or one Problem, and frees its rows."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from serve.errors import Problem
from serve.llm.decoding import Made
from serve.llm.speaker import Speaker
from serve.llm.text_orders import Accepted, Delta, Ended, Message, Sampling, TextOrder
from serve.llm.transformers_engine import Listener
from tests.serve.llm.texts import CIRCLE, WORDS, FakeLlm, end_of, fake_speaker, text_of, updates_of


def run(speaker: Speaker, order: TextOrder = CIRCLE, **sampling: Any) -> Any:
    order = replace(order, sampling=replace(order.sampling, **sampling))
    return asyncio.run(updates_of(speaker, order))


def problem_of(speaker: Speaker, order: TextOrder = CIRCLE, **sampling: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        run(speaker, order, **sampling)
    return caught.value


def test_an_answer_comes_word_by_word_and_is_counted() -> None:
    updates = run(fake_speaker())
    assert updates[0] == Accepted(4) and text_of(updates) == "".join(WORDS)
    assert updates[-1] == Ended("stop", 4, len(WORDS))
    assert sum(isinstance(update, Delta) for update in updates) == len(WORDS)


@pytest.mark.parametrize("stop", ["ed cir", " on", "d"])
def test_a_stop_string_ends_the_answer_across_tokens(stop: str) -> None:
    engine = FakeLlm()
    updates = run(fake_speaker(engine), stop=(stop,))
    assert text_of(updates) == "".join(WORDS).partition(stop)[0]
    assert end_of(updates).reason == "stop" and engine.cancelled == 1 and engine.open == 0


def test_max_tokens_ends_it_with_length() -> None:
    updates = run(fake_speaker(), max_tokens=3)
    assert text_of(updates) == "a red circle" and end_of(updates) == Ended("length", 4, 3)


def test_the_answer_has_what_the_context_leaves() -> None:
    engine = FakeLlm()
    run(fake_speaker(engine), max_tokens=None)
    assert engine.asked[0].max_tokens == 512 - 4


@pytest.mark.parametrize(("prompt", "most"), [("circle " * 600, None), ("circle", 511)])
def test_a_context_too_long_is_named(prompt: str, most: int | None) -> None:
    problem = problem_of(fake_speaker(), TextOrder((Message("user", prompt),)), max_tokens=most)
    assert (problem.status, problem.code) == (400, "context_length_exceeded")
    assert problem.param == "messages"
    plain = TextOrder("circle " * 600)
    assert problem_of(fake_speaker(), plain).param == "prompt"


def test_a_full_queue_is_a_429() -> None:
    """Also of requests that come together."""
    engine = FakeLlm(token_s=0.1)
    speaker = fake_speaker(engine, queue=2)
    run(speaker, max_tokens=4)

    async def burst(count: int) -> list[Any]:
        orders = (updates_of(speaker, CIRCLE) for _ in range(count))
        return await asyncio.gather(*orders, return_exceptions=True)

    found = asyncio.run(burst(engine.rows + 5))
    problems = [each for each in found if isinstance(each, Problem)]
    assert [problem.status for problem in problems] == [429] * 3
    assert problems[0].retry_after_s is not None
    assert problems[0].retry_after_s >= 4 * 0.1 * 3 / 13, "an answer's time, for those that wait"
    assert len(run(speaker)) > 1, "later requests are served"


def test_a_deadline_frees_what_the_ask_held() -> None:
    engine = FakeLlm(token_s=0.2)
    problem = problem_of(fake_speaker(engine), replace(CIRCLE, deadline_s=0.3))
    assert problem.status == 408 and engine.open == 0 and engine.cancelled == 1


def test_an_engine_s_failure_is_a_500_that_says_nothing_of_it() -> None:
    engine = FakeLlm()
    engine.fault = RuntimeError("/secret/path")
    problem = problem_of(fake_speaker(engine))
    assert problem.status == 500 and "secret" not in problem.message and engine.open == 0


def test_json_needs_a_backend_with_grammars() -> None:
    problem = problem_of(fake_speaker(), json_schema="{}")
    assert (problem.status, problem.param) == (400, "response_format")


async def sample(speaker: Speaker, name: str, **labels: str) -> float:
    found = [s for metric in await speaker.metrics() for s in metric.samples]
    return sum(s.value for s in found if s.name == name and labels.items() <= s.labels.items())


async def test_metrics_report_times_tokens_and_the_cache() -> None:
    speaker = fake_speaker()
    await updates_of(speaker, CIRCLE)
    with pytest.raises(Problem):
        await updates_of(speaker, replace(CIRCLE, sampling=Sampling(json_schema="{}")))
    assert await sample(speaker, "sdxl_llm_first_token_seconds_count") == 1
    assert await sample(speaker, "sdxl_llm_output_token_seconds_count") == 1
    assert await sample(speaker, "sdxl_llm_tokens_total", kind="completion") == len(WORDS)
    assert await sample(speaker, "sdxl_llm_answers_total", outcome="stop") == 1
    assert await sample(speaker, "sdxl_llm_answers_total", outcome="invalid_value") == 1
    assert await sample(speaker, "sdxl_llm_kv_cache_share") == 0


@pytest.mark.usefixtures("one_gpu")
async def test_its_gpus_are_not_those_for_images() -> None:
    joules = await sample(fake_speaker(), "sdxl_gpu_energy_joules_total", gpu="0", work="llm")
    assert joules == 1.5


async def test_two_hundred_clients_that_leave_leave_nothing_behind(speaker: Speaker) -> None:
    """Afterwards every row of the cache is free, and generation works as before."""

    async def leave(number: int) -> None:
        asked = TextOrder((Message("user", "circle"),), Sampling(max_tokens=400, seed=number))
        async with aclosing(speaker.generate(asked)) as updates:
            async for update in updates:
                if isinstance(update, Delta) or number % 3 == 0:
                    return

    expected = text_of(await updates_of(speaker, CIRCLE))
    for first in range(0, 200, 40):
        await asyncio.gather(*(leave(number) for number in range(first, first + 40)))
    until = time.monotonic() + 30
    while (left := await speaker.engine.occupancy()).running or left.waiting:
        assert time.monotonic() < until, f"{left} after every client left"
        await asyncio.sleep(0.01)
    assert left.kv_share == 0
    assert text_of(await updates_of(speaker, CIRCLE)) == expected


async def test_one_failure_ends_one_text(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    emit = Listener.emit

    def trips(self: Listener, made: Made) -> None:
        if made.generation.sampling.seed == 13:
            raise RuntimeError("/secret")
        emit(self, made)

    monkeypatch.setattr(Listener, "emit", trips)
    orders = [replace(CIRCLE, sampling=replace(CIRCLE.sampling, seed=seed)) for seed in (13, 4)]
    broken, whole = await asyncio.gather(
        *(updates_of(speaker, order) for order in orders), return_exceptions=True
    )
    assert isinstance(broken, Problem) and broken.status == 500 and "secret" not in str(broken)
    assert isinstance(whole, list) and text_of(whole)
    speaker.engine.check_health()
    monkeypatch.undo()
    assert text_of(await updates_of(speaker, orders[0]))
