"""Replicas behind a Ray Serve handle, as one ImageBackend.

A replica that dies in the middle is no error: the order, its seed fixed, goes to another one. It
knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)

from serve import errors
from serve.errors import Problem
from serve.orders import Done, ModelCard, Order, Queued, Update

log = logging.getLogger(__name__)

T = TypeVar("T")
LOST = (RayActorError, ReplicaUnavailableError)
ATTEMPTS = 4
PAUSE_S = 0.1
"""Routers hear twice a second who is starting or leaving; a second replica is asked at once."""
CARD_AGE_S, CARD_TIMEOUT_S = 2.0, 3.0
METRICS_TIMEOUT_S = 3.0
ELSEWHERE = ("shutting_down", "unhealthy", "starting")
"""Problems of one replica that another need not have."""


class Replicas:
    """Implements ImageBackend over a Ray Serve DeploymentHandle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        # What travels is our own plain data: a picture need not pass Ray's pickler for everything.
        self._stream = handle.options(
            stream=True, request_serialization="pickle", response_serialization="pickle"
        )
        self._card: ModelCard | None = None
        self._card_s = 0.0

    async def card(self) -> ModelCard:
        now = time.monotonic()
        if self._card is None or now - self._card_s > CARD_AGE_S:
            self._card, self._card_s = await self._ask_card(), now
        return self._card

    async def _ask_card(self) -> ModelCard:
        found: ModelCard = await ask_any(self._handle.card)
        return found

    async def generate(self, order: Order) -> AsyncGenerator[Update]:
        def begin(left_s: float) -> AsyncGenerator[Update]:
            return attempt(self._stream.generate, replace(order, deadline_s=left_s), Done)

        is_queued = False
        async with aclosing(persevere(begin, order.deadline_s)) as updates:
            async for _, update in updates:
                if not (is_queued and isinstance(update, Queued)):
                    yield update
                is_queued = True

    async def metrics(self) -> Sequence[Any]:
        return await gather(self._handle, "metrics")


async def ask_any(method: Any) -> Any:
    """Of any replica that is alive; the router may not know yet that one isn't."""
    for _ in range(ATTEMPTS):
        try:
            return await asyncio.wait_for(method.remote(), CARD_TIMEOUT_S)
        except LOST:
            continue
        except (TimeoutError, DeploymentUnavailableError, BackPressureError):
            break
    raise errors.starting()


async def persevere(
    begin: Callable[[float], AsyncGenerator[T]], deadline_s: float
) -> AsyncGenerator[tuple[int, T]]:
    """What an attempt yields, and which attempt it is; after one that lost its replica, another,
    with the seconds that are left."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + deadline_s
    cause = Problem(503, "No replica could finish it.", None, "unavailable", 5.0)
    for number in range(1, ATTEMPTS + 1):
        left_s = until_s - clock()
        if left_s <= 0:
            raise errors.late()
        try:
            async with aclosing(begin(left_s)) as updates:
                async for update in updates:
                    yield number, update
            return
        except (*LOST, Problem) as error:
            if isinstance(error, Problem):
                if error.code not in ELSEWHERE:
                    raise
                cause = error
                await asyncio.sleep(PAUSE_S * (number - 1))
            log.warning("attempt %d of %d: %s", number, ATTEMPTS, type(error).__name__)
        except DeploymentUnavailableError:
            raise errors.draining() from None
        except BackPressureError:
            raise Problem(429, "Too many wait.", None, "overloaded", 1.0) from None
    raise cause


async def attempt(method: Any, asked: object, last: type) -> AsyncGenerator[Any]:
    """One replica's updates, up to one of the type `last`. Leaving earlier cancels the call."""
    updates = method.remote(asked)
    is_over = False
    try:
        async for update in updates:
            if isinstance(update, Problem):
                is_over = True
                raise update
            is_over = isinstance(update, last)
            yield update
    finally:
        if not is_over:
            updates.cancel()


async def gather(handle: Any, method: str) -> list[Any]:
    """What every replica of a deployment says, of those that answer."""
    try:
        answers = await handle.broadcast(method).results_async(
            timeout_s=METRICS_TIMEOUT_S, return_exceptions=True
        )
    except (TimeoutError, *LOST, DeploymentUnavailableError):
        return []
    return [item for answer in answers if isinstance(answer, Sequence) for item in answer]
