"""Replicas behind a Ray Serve handle, as one ImageBackend.

If a replica dies or hangs, the order, whose seed is fixed, goes to another one. It knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from ray.exceptions import RayActorError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)

from sdxl.source import SourceImage
from serve import errors
from serve.errors import Problem
from serve.fleet import liveness
from serve.fleet.beats import SILENCE_S, Silent, while_alive
from serve.orders import Done, ImageOrder, ModelCard, Preview, PromptFacts, Queued, Update

log = logging.getLogger(__name__)

T = TypeVar("T")
LOST = (RayActorError, ReplicaUnavailableError)
ATTEMPTS = 4
PAUSE_S = 0.1
"""Routers learn twice a second which replicas start or leave; a second one is tried at once."""
CARD_AGE_S, CARD_TIMEOUT_S = 2.0, 2.0
CARD_STALE_S = 30.0
"""How long an old card is used while no replica answers: orders begun meanwhile wait for a
replica to come back."""
METRICS_TIMEOUT_S = 3.0
ELSEWHERE = ("shutting_down", "unhealthy", "starting", errors.OTHER_MODEL)
"""Problems of one replica that others may not have."""


class Known(Generic[T]):
    """The replicas' cards, queried periodically and not by every request."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._said: T | None = None
        self._said_s = -math.inf
        self._asking: asyncio.Task[T] | None = None

    async def lately(self) -> T:
        """Return at once if the replica answered recently."""
        age_s = time.monotonic() - self._said_s
        asking = self._renewed() if age_s > CARD_AGE_S else None
        if self._said is None or age_s > CARD_STALE_S:
            return await self.now()
        if asking is not None:
            asking.add_done_callback(_look)
        return self._said

    async def now(self) -> T:
        """Return the card, at most two seconds old, or raise Problem if no replica answers."""
        if self._said is not None and time.monotonic() - self._said_s <= CARD_AGE_S:
            return self._said
        return await asyncio.shield(self._renewed())

    def _renewed(self) -> asyncio.Task[T]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._renew())
        return self._asking

    async def _renew(self) -> T:
        self._said = await self._ask()
        self._said_s = time.monotonic()
        return self._said


def _look(task: asyncio.Task[Any]) -> None:
    """Read the error of a task whose result is not awaited, so that asyncio logs none."""
    if not task.cancelled():
        task.exception()


class Replicas:
    """Implements ImageBackend over a Ray Serve DeploymentHandle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        # What travels is our own plain data: a picture need not pass Ray's pickler for everything.
        self._stream = handle.options(
            stream=True, request_serialization="pickle", response_serialization="pickle"
        )
        # As a Ray actor's call: Ray's store holds the source of an edit once for all its pictures.
        self._by_reference = handle.options(stream=True, _by_reference=True)
        self._sources: WeakKeyDictionary[SourceImage, Any] = WeakKeyDictionary()
        self._liveness = liveness.of_deployment(handle.deployment_name)
        self._card: Known[ModelCard] = Known(partial(ask_any, handle.card))
        self._is_leaving = False

    def leave(self) -> None:
        """The model is being unloaded: pictures that are not begun are refused by this name."""
        self._is_leaving = True

    async def close(self) -> None:
        self.leave()
        await self._handle.shutdown_async()

    async def card(self) -> ModelCard:
        if self._is_leaving:
            raise errors.unloaded()
        return self._of_all(await self._card.lately())

    async def ready(self) -> ModelCard:
        return self._of_all(await self._card.now())

    def _of_all(self, card: ModelCard) -> ModelCard:
        """Return one replica's card with the capacity of all."""
        return replace(card, at_once=card.at_once * max(1, self._liveness.count))

    async def examine(self, prompt: str) -> PromptFacts:
        facts: PromptFacts | Problem = await ask_any(self._handle.examine, prompt)
        if isinstance(facts, Problem):
            raise facts
        return facts

    async def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        def begin(left_s: float) -> AsyncGenerator[Update]:
            timed = replace(order, deadline_s=left_s, source=None)
            if order.source is None:
                return attempt(self._stream.generate, (timed,), Done, self._liveness)
            reference = self._stored(order.source)
            return attempt(self._by_reference.generate, (timed, reference), Done, self._liveness)

        # Another attempt is queued again, and comes by steps that were shown.
        sent: set[Hashable] = set()
        try:
            async with aclosing(persevere(begin, order.deadline_s)) as updates:
                async for _, update in updates:
                    what = sent_once(update)
                    if what is None or what not in sent:
                        yield update
                    sent.add(what)
        except Problem as problem:
            if self._is_leaving and problem.code in ELSEWHERE:
                raise errors.unloaded() from None
            raise

    def _stored(self, source: SourceImage) -> Any:
        """Store the source in Ray's object store; it stays as long as a picture needs it."""
        import ray

        if source not in self._sources:
            self._sources[source] = ray.put(source)
        return self._sources[source]

    async def metrics(self) -> Sequence[Any]:
        return await gather(self._handle, "metrics")


def sent_once(update: Update) -> Hashable:
    """Return the part of an update that must not be sent twice; None if it may repeat."""
    match update:
        case Queued():
            return Queued
        case Preview():
            return Preview, update.step
    return None


async def ask_any(method: Any, *asked: object) -> Any:
    """Ask any replica that answers; the router may not yet know that one does not."""
    for _ in range(ATTEMPTS):
        try:
            return await asyncio.wait_for(method.remote(*asked), CARD_TIMEOUT_S)
        except (TimeoutError, *LOST):
            continue
        except (DeploymentUnavailableError, BackPressureError):
            break
    raise errors.starting()


async def persevere(
    begin: Callable[[float], AsyncGenerator[T]], deadline_s: float
) -> AsyncGenerator[tuple[int, T]]:
    """Yield updates with the number of their attempt. After a lost replica another attempt gets the
    remaining seconds. The first is always made: the replica itself refuses a deadline that is too
    short."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + deadline_s
    cause = Problem(503, "No replica could finish it.", None, "unavailable", 5.0)
    number, failures = 0, 0
    while failures < ATTEMPTS:
        number += 1
        left_s = until_s - clock()
        if left_s <= 0 and number > 1:
            raise errors.late()
        try:
            async with aclosing(begin(left_s)) as updates:
                async for update in updates:
                    yield number, update
            return
        except Silent:
            # Bounded by the deadline alone, since the next replica may hang as well.
            log.warning("attempt %d: no word for %.1f s", number, SILENCE_S)
        except (*LOST, Problem) as error:
            if isinstance(error, Problem):
                if error.code not in ELSEWHERE:
                    raise
                cause = error
                await asyncio.sleep(PAUSE_S * failures)
            failures += 1
            log.warning("attempt %d of %d: %s", failures, ATTEMPTS, type(error).__name__)
        except DeploymentUnavailableError:
            raise errors.draining() from None
        except BackPressureError:
            raise Problem(429, "Too many wait.", None, "overloaded", 1.0) from None
    raise cause


async def attempt(
    method: Any, arguments: Sequence[object], last: type, known: liveness.Liveness
) -> AsyncGenerator[Any]:
    """Yield one replica's updates up to one of the type `last`. Leaving earlier cancels the call,
    as does a silent replica while another answers."""
    call = method.remote(*arguments)
    name, is_over = call_name(call), False

    def silent_s() -> float:
        holder = known.holder(name)
        return math.inf if holder is None else known.unheard_s(holder)

    try:
        alive = while_alive(aiter(call), silent_s, lambda: known.has_any)
        async with aclosing(alive) as updates:
            async for update in updates:
                if isinstance(update, Problem):
                    is_over = True
                    raise update
                is_over = isinstance(update, last)
                yield update
    finally:
        known.left(name)
        if not is_over:
            call.cancel()


def call_name(call: Any) -> str:
    """The id under which the router records its replica. Ray's `request_id` is that of the HTTP
    request, which may cause several calls."""
    return str(call._request_metadata.internal_request_id)


async def gather(handle: Any, method: str) -> list[Any]:
    """Collect an answer from every replica that answers."""
    broadcast = handle.broadcast(method)
    try:
        async with asyncio.timeout(METRICS_TIMEOUT_S):
            # Its own `results_async` gives nothing at all where one replica hangs.
            calls = await broadcast._fetch_replica_results_async()
    except (TimeoutError, *LOST, DeploymentUnavailableError):
        return []
    limited = [asyncio.wait_for(call.get_async(), METRICS_TIMEOUT_S) for call in calls]
    answers = await asyncio.gather(*limited, return_exceptions=True)
    return [item for answer in answers if isinstance(answer, Sequence) for item in answer]
