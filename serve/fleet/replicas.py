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
from contextvars import Context
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
"""Multiplied by the failures so far: the second attempt starts at once. Routers learn twice a
second which replicas start or leave."""
CARD_AGE_S, CARD_TIMEOUT_S = 2.0, 2.0
CARD_STALE_S = 30.0
"""How long an old card is used while no replica answers: meanwhile orders wait for a replica."""
METRICS_TIMEOUT_S = 3.0
ELSEWHERE = ("shutting_down", "unhealthy", "starting", errors.OTHER_MODEL)
"""Codes of Problems that another replica may not have."""


class CachedCard(Generic[T]):
    """The replicas' card, queried periodically and not for every request."""

    def __init__(self, query: Callable[[], Awaitable[T]]) -> None:
        self._query = query
        self._card: T | None = None
        self._card_s = -math.inf
        self._renewal: asyncio.Task[T] | None = None

    async def recent(self) -> T:
        """Return the card, at once if it is at most CARD_STALE_S old; renew it after CARD_AGE_S."""
        age_s = time.monotonic() - self._card_s
        renewal = self._renew() if age_s > CARD_AGE_S else None
        if self._card is None or age_s > CARD_STALE_S:
            return await self.now()
        if renewal is not None:
            renewal.add_done_callback(_read_error)
        return self._card

    async def now(self) -> T:
        """Return the card, at most CARD_AGE_S old, or raise Problem if no replica answers."""
        if self._card is not None and time.monotonic() - self._card_s <= CARD_AGE_S:
            return self._card
        return await asyncio.shield(self._renew())

    def _renew(self) -> asyncio.Task[T]:
        if self._renewal is None or self._renewal.done():
            # In a new context: in this request's, Ray Serve would cancel the task with the request.
            self._renewal = asyncio.create_task(self._fetch(), context=Context())
        return self._renewal

    async def _fetch(self) -> T:
        self._card = await self._query()
        self._card_s = time.monotonic()
        return self._card


def _read_error(task: asyncio.Task[Any]) -> None:
    """Read the error of a task that nothing awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


class Replicas:
    """Implements ImageBackend over a Ray Serve DeploymentHandle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        # Messages are plain data, for which Python's pickle is enough and faster than Ray's.
        self._stream = handle.options(
            stream=True, request_serialization="pickle", response_serialization="pickle"
        )
        # By reference: Ray's object store holds an edit's source once for all its pictures.
        self._by_reference = handle.options(stream=True, _by_reference=True)
        self._sources: WeakKeyDictionary[SourceImage, Any] = WeakKeyDictionary()
        self._liveness = liveness.of_deployment(handle.deployment_name)
        self._card: CachedCard[ModelCard] = CachedCard(partial(ask_any, handle.card))
        self._is_leaving = False

    def leave(self) -> None:
        """The model is being unloaded: from now on, refused orders fail with errors.unloaded."""
        self._is_leaving = True

    async def close(self) -> None:
        self.leave()
        await self._handle.shutdown_async()

    async def card(self) -> ModelCard:
        if self._is_leaving:
            raise errors.unloaded()
        return self._with_all(await self._card.recent())

    async def ready(self) -> ModelCard:
        return self._with_all(await self._card.now())

    def _with_all(self, card: ModelCard) -> ModelCard:
        """Return a replica's card with the capacity of all replicas."""
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

        # A second attempt repeats updates that were already sent.
        sent: set[Hashable] = set()
        try:
            async with aclosing(retry(begin, order.deadline_s)) as updates:
                async for _, update in updates:
                    key = key_of_update(update)
                    if key is None or key not in sent:
                        yield update
                    sent.add(key)
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


def key_of_update(update: Update) -> Hashable:
    """Return a key: of updates with the same key only the first is sent. None: all are sent."""
    match update:
        case Queued():
            return Queued
        case Preview():
            return Preview, update.step
    return None


async def ask_any(method: Any, *arguments: object) -> Any:
    """Call a method of any replica that answers; try several, since some may have just died."""
    for _ in range(ATTEMPTS):
        try:
            return await asyncio.wait_for(method.remote(*arguments), CARD_TIMEOUT_S)
        except (TimeoutError, *LOST):
            continue
        except (DeploymentUnavailableError, BackPressureError):
            break
    raise errors.starting()


async def retry(
    begin: Callable[[float], AsyncGenerator[T]], deadline_s: float
) -> AsyncGenerator[tuple[int, T]]:
    """Yield updates with the number of their attempt. After a lost replica the next attempt gets
    the remaining time. The first attempt is always made: the replica itself refuses a deadline that
    is too short."""
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
            # Not a failure: only the deadline bounds these attempts, as many replicas may hang.
            log.warning("attempt %d: no update for %.1f s", number, SILENCE_S)
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
    """Yield one replica's updates up to one of the type `last`. Closing earlier cancels the call;
    so does a silent replica if another one answers."""
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
        known.forget(name)
        if not is_over:
            call.cancel()


def call_name(call: Any) -> str:
    """Return the call's id, under which the router records its replica. Ray's `request_id` is
    shared by all calls of an HTTP request."""
    return str(call._request_metadata.internal_request_id)


async def gather(handle: Any, method: str) -> list[Any]:
    """Call a method of every replica; return the items of all answers that arrive in time."""
    broadcast = handle.broadcast(method)
    try:
        async with asyncio.timeout(METRICS_TIMEOUT_S):
            # Ray's `results_async` returns nothing at all if one replica hangs.
            calls = await broadcast._fetch_replica_results_async()
    except (TimeoutError, *LOST, DeploymentUnavailableError):
        return []
    limited = [asyncio.wait_for(call.get_async(), METRICS_TIMEOUT_S) for call in calls]
    answers = await asyncio.gather(*limited, return_exceptions=True)
    return [item for answer in answers if isinstance(answer, Sequence) for item in answer]
