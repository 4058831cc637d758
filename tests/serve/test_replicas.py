"""Orders to replicas that die: each ends with its picture or one Problem, and keeps its seed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from PIL import Image
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError

from sdxl.params import GenerationParams, Sizes
from sdxl.source import SourceImage
from serve import errors
from serve.errors import Problem
from serve.fleet import beats, liveness, replicas
from serve.fleet.replicas import ATTEMPTS, CachedCard, Replicas
from serve.llm.text_orders import Ended
from serve.orders import Done, ImageOrder, ImageProgress, ModelCard, Preview, Queued

ORDER = ImageOrder(GenerationParams("a", seed=7), deadline_s=60)
CARD = ModelCard("m", Sizes(128, 64, 512))
DIED = ActorDiedError()


def done(order: ImageOrder) -> Done:
    return Done(b"x", order.params, {}, 1, 1, 77)


class Answer:
    """One call's updates. Data is yielded, and exceptions are raised."""

    def __init__(self, script: Sequence[Any]) -> None:
        self.script, self.is_cancelled = script, False
        self._request_metadata = SimpleNamespace(internal_request_id=f"call {id(self)}")

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self.script:
            if isinstance(item, Exception) and not isinstance(item, Problem):
                raise item
            yield item
        if not (self.script and isinstance(self.script[-1], Done | Ended)):
            await asyncio.Event().wait()

    def __await__(self) -> Any:
        return anext(aiter(self)).__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """Stands for Ray's handle. The calls get the scripts in turn."""

    def __init__(self, *scripts: Sequence[Any], kind: type[Answer] = Answer) -> None:
        self.kind = kind
        self.scripts, self.asked, self.answers = list(scripts), list[Any](), list[Answer]()
        self.generate = self.card = self
        self.deployment_name = f"replicas of {id(self)}"

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *arguments: Any) -> Answer:
        self.asked += arguments
        self.answers.append(self.kind(self.scripts.pop(0)))
        return self.answers[-1]


async def updates_of(handle: Handle) -> list[Any]:
    async with aclosing(Replicas(handle).generate(ORDER)) as updates:
        return [update async for update in updates]


@pytest.mark.parametrize(
    "loss",
    [DIED, ActorUnavailableError("gone", None), errors.draining(), Problem(503, code="unhealthy")],
)
def test_a_lost_replica_s_picture_is_made_elsewhere_with_its_seed(loss: Exception) -> None:
    first = [Queued(0), ImageProgress(3, 20, 0, 1.0), loss]
    handle = Handle(first, [Queued(0), ImageProgress(1, 20, 0, 1.0), done(ORDER)])
    updates = asyncio.run(updates_of(handle))
    assert [type(u) for u in updates] == [Queued, ImageProgress, ImageProgress, Done]
    assert {order.params for order in handle.asked} == {ORDER.params}
    assert handle.asked[1].deadline_s <= handle.asked[0].deadline_s <= 60


def test_the_next_replica_does_not_repeat_a_shown_step() -> None:
    early, late, last = Preview(b"x", 5), Preview(b"y", 10), Preview(b"z", 15)
    handle = Handle([Queued(0), late, early, DIED], [Queued(0), early, late, last, done(ORDER)])
    updates = asyncio.run(updates_of(handle))
    assert [type(u) for u in updates] == [Queued, Preview, Preview, Preview, Done]
    assert updates[1:4] == [late, early, last]


def test_the_card_counts_what_all_replicas_take_at_once() -> None:
    handle = Handle([replace(CARD, at_once=16)])
    liveness.of_deployment(handle.deployment_name).keep(("one", "two", "three"))
    assert asyncio.run(Replicas(handle).card()).at_once == 48


def test_orders_that_replicas_refuse_wait_longer_each_time_and_less_than_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def note(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr("asyncio.sleep", note)
    with pytest.raises(Problem):
        asyncio.run(updates_of(Handle(*[[errors.draining()]] * ATTEMPTS)))
    assert pauses[0] == 0 and pauses == sorted({*pauses}) and sum(pauses) < 1, pauses


@pytest.mark.parametrize(
    ("error", "status", "attempts"),
    [
        (DIED, 503, ATTEMPTS),
        (BackPressureError(9, 9), 429, 1),
        (Problem(429, code="overloaded"), 429, 1),
        (Problem(400), 400, 1),
        (Problem(500, code="engine"), 500, 1),
    ],
    ids=str,
)
def test_a_few_replicas_may_be_lost_and_a_refusal_is_not_tried_elsewhere(
    error: Exception, status: int, attempts: int
) -> None:
    handle = Handle(*[[error]] * ATTEMPTS)
    with pytest.raises(Problem) as caught:
        asyncio.run(updates_of(handle))
    assert (caught.value.status, len(handle.asked)) == (status, attempts)
    assert caught.value is error or not isinstance(error, Problem)


async def test_leaving_cancels_the_call() -> None:
    handle = Handle([Queued(0)])
    async with aclosing(Replicas(handle).generate(ORDER)) as updates:
        assert isinstance(await anext(updates), Queued)
    assert handle.answers[0].is_cancelled


def test_the_card_is_that_of_any_replica_alive() -> None:
    handle = Handle([DIED], [CARD])
    assert asyncio.run(Replicas(handle).card()) == CARD
    with pytest.raises(Problem) as caught:
        asyncio.run(Replicas(Handle(*[[DIED]] * ATTEMPTS)).card())
    assert caught.value.status == 503


@pytest.mark.parametrize(
    ("first", "status"), [(Problem(429, code="overloaded"), 429), (DIED, 408)], ids=str
)
async def test_an_order_without_time_is_refused_once(first: Exception, status: int) -> None:
    handle = Handle([first])
    with pytest.raises(Problem) as caught:
        late = ImageOrder(ORDER.params, deadline_s=0)
        async for _ in Replicas(handle).generate(late):
            pass
    assert caught.value.status == status and len(handle.asked) == 1


async def test_a_listener_cancelled_again_and_again_still_closes_its_stream() -> None:
    """anyio cancels repeatedly, and Starlette streams inside anyio."""
    ended = []

    async def talk() -> AsyncGenerator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.append("talk")

    async def listen(updates: AsyncGenerator[int]) -> None:
        async with aclosing(updates), aclosing(beats.patient(updates, lambda: 10.0)) as heard:
            async for _ in heard:
                pass

    async with anyio.create_task_group() as group:
        group.start_soon(listen, talk())
        await asyncio.sleep(0.05)
        group.cancel_scope.cancel()
    assert ended == ["talk"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "SILENCE_S", 0.3)


def heard(handle: Handle) -> None:
    liveness.of_deployment(handle.deployment_name).note_answer("another")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sent", [[], [Queued(0)], [Queued(0), ImageProgress(3, 20, 0, 1.0)]])
def test_an_order_whose_replica_falls_silent_goes_to_another_with_its_seed(sent: list[Any]) -> None:
    handle = Handle(sent, [Queued(0), done(ORDER)])
    heard(handle)
    updates = asyncio.run(updates_of(handle))
    assert isinstance(updates[-1], Done) and {o.params for o in handle.asked} == {ORDER.params}
    assert handle.answers[0].is_cancelled and not handle.answers[1].is_cancelled


@pytest.mark.usefixtures("quick")
def test_a_silent_replica_is_awaited_if_no_other_answers() -> None:
    class Slow(Answer):
        async def __aiter__(self) -> AsyncIterator[Any]:
            await asyncio.sleep(1.0)
            async for update in super().__aiter__():
                yield update

    handle = Handle([Queued(0), done(ORDER)], kind=Slow)
    assert isinstance(asyncio.run(updates_of(handle))[-1], Done) and len(handle.asked) == 1


async def updates_while(handle: Handle, name: str) -> list[Any]:
    """Collect the updates while the replica of this name answers the router's questions."""

    async def answer() -> None:
        while True:
            liveness.of_deployment(handle.deployment_name).note_answer(name)
            await asyncio.sleep(0.01)

    asking = asyncio.create_task(answer())
    try:
        return await updates_of(handle)
    finally:
        asking.cancel()


class Held(Answer):
    """A call without updates for three times SILENCE_S, while the router knows its replica."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        known = liveness.of_deployment(self.script[0])
        known.note_holder(self._request_metadata.internal_request_id, self.script[1])
        await asyncio.sleep(1.0)
        for update in self.script[2:]:
            yield update


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("holders", [["busy"], ["hangs", "another"]])
async def test_a_silent_order_stays_only_with_a_replica_that_answers(holders: list[str]) -> None:
    handle = Handle(kind=Held)
    name = handle.deployment_name
    handle.scripts = [[name, holder] for holder in holders]
    handle.scripts[-1] = [name, holders[-1], Queued(0), done(ORDER)]
    known = liveness.of_deployment(name)
    for each in (holders[0], "another"):
        known.note_answer(each)
    assert [type(u) for u in await updates_while(handle, holders[-1])] == [Queued, Done]
    assert [a.is_cancelled for a in handle.answers] == [True] * (len(holders) - 1) + [False]
    assert len(handle.asked) == len(holders)
    assert known.holder(handle.answers[-1]._request_metadata.internal_request_id) is None


async def test_an_unhealthy_replica_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "CHECK_S", 0.02)

    async def never() -> AsyncGenerator[int]:
        yield 1
        await asyncio.Event().wait()

    def check() -> None:
        raise Problem(503, code="unhealthy")

    async with aclosing(beats.with_checks(never(), check)) as updates:
        assert await anext(updates) == 1
        with pytest.raises(Problem):
            await anext(updates)


def test_a_silent_replica_s_card_is_asked_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CARD_TIMEOUT_S", 0.05)
    assert asyncio.run(Replicas(Handle([], [CARD])).card()) == CARD


async def test_the_card_is_asked_for_outside_of_the_request() -> None:
    """Ray Serve cancels what a request asks for when its client leaves; others wait for it too."""
    of_request = ContextVar("request", default="")
    of_request.set("mine")

    async def query() -> str:
        return of_request.get()

    assert await CachedCard(query).now() == ""


async def test_a_known_card_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CARD_AGE_S", 0.0)
    lost = [[DIED]] * (2 * ATTEMPTS)
    fleet = Replicas(Handle([CARD], *lost))
    assert await fleet.ready() == CARD
    assert await fleet.card() == CARD
    with pytest.raises(Problem) as caught:
        await fleet.ready()
    assert caught.value.status == 503 and await fleet.card() == CARD
    monkeypatch.setattr(replicas, "CARD_STALE_S", 0.0)
    with pytest.raises(Problem):
        await fleet.card()


async def test_a_request_stores_the_source_of_an_edit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[object] = []

    def put(value: object) -> int:
        stored.append(value)
        return len(stored)

    monkeypatch.setattr("ray.put", put)
    source = SourceImage(Image.new("RGB", (64, 64)), None)
    orders = [replace(ORDER, source=source) for _ in range(10)]
    handle = Handle(*[[Queued(0), done(ORDER)]] * len(orders))
    model = Replicas(handle)
    for order in orders:
        async with aclosing(model.generate(order)) as updates:
            assert isinstance([update async for update in updates][-1], Done)
    assert stored == [source]
    sent = list(zip(handle.asked[::2], handle.asked[1::2], strict=True))
    assert all(order.source is None and reference == 1 for order, reference in sent)


async def test_an_unloaded_model_finishes_its_pictures_and_refuses_others() -> None:
    handle = Handle([Queued(1), done(ORDER)])
    backend = Replicas(handle)
    async with aclosing(backend.generate(ORDER)) as updates:
        assert isinstance(await anext(updates), Queued)
        backend.leave()
        assert isinstance(await anext(updates), Done)
    handle.scripts = [[errors.draining()] for _ in range(ATTEMPTS)]
    with pytest.raises(Problem, match="unloaded") as caught:
        async with aclosing(backend.generate(ORDER)) as updates:
            await anext(updates)
    assert caught.value.status == 404
    with pytest.raises(Problem, match="unloaded"):
        await backend.card()


async def test_a_job_of_an_unloaded_model_fails_instead_of_waiting() -> None:
    from serve.batch_api.batch_job import BackendRenderer

    backend = Replicas(Handle())
    backend.leave()
    with pytest.raises(Problem, match="unloaded"):
        await BackendRenderer(backend, "c", "r").card()
