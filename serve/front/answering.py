"""Shared by answers with pictures and with text: deadlines, a key's limits, several orders at once,
and server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from serve import errors
from serve.errors import Problem
from serve.fleet.beats import NOTHING, patient, within
from serve.front.keys import ApiKey, RateLimiter
from serve.orders import Done
from serve.settings import ServeSettings

DEADLINE_HEADER = "x-deadline-s"
GRACE_S = 5.0
"""Time after a deadline for the backend to report it."""
COMMENT, COMMENT_S = b":\n\n", 15.0
SSE_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
EVENTS_IN_OPENAPI: dict[str, dict[str, Any]] = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        }
    }
}
"""The schema of every stream. `itemSchema` is from OpenAPI 3.2; tools for 3.1 also read it."""

O_contra = TypeVar("O_contra", contravariant=True)
O = TypeVar("O")  # noqa: E741
U = TypeVar("U")
U_co = TypeVar("U_co", covariant=True)


class Maker(Protocol[O_contra, U_co]):
    """An ImageBackend or a TextBackend."""

    def generate(self, order: O_contra, /) -> AsyncGenerator[U_co]: ...


def deadline_of(
    asked_s: float | None, request: Request, settings: ServeSettings, *, is_patient: bool = False
) -> float:
    """Return the deadline of the body, or the header, or the default, which is infinite if
    `is_patient`."""
    seconds = asked_s
    text = request.headers.get(DEADLINE_HEADER)
    if seconds is None and text is not None:
        try:
            # Python reads 1_0 as 10.
            seconds = -1.0 if "_" in text else float(text)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            raise errors.invalid(
                DEADLINE_HEADER, f"{DEADLINE_HEADER} must be a number of seconds above 0"
            )
    if seconds is None and is_patient:
        return math.inf
    return min(seconds or settings.deadline_s, settings.max_deadline_s)


def take_rate(
    limiter: RateLimiter,
    request: Request,
    count: int,
    work: float = 0.0,
    *,
    is_charged: bool = True,
) -> None:
    """Charge the key with `count` pictures or answers, and `work` in standard images. Before its
    pictures are decoded, which costs much too, a request is refused by `is_charged=False`."""
    key: ApiKey | None = getattr(request.state, "key", None)
    if key is None:
        return
    limit, wait_s = limiter.take(key, count, work, is_charged=is_charged)
    if wait_s > 0:
        raise Problem(429, f"The key's limit is {limit}.", None, "rate_limit_exceeded", wait_s)


def fan_out(
    backend: Maker[O, U], orders: Sequence[O], deadline_s: float, last: type = Done
) -> AsyncGenerator[tuple[int, U]]:
    """Yield the updates of all orders with the order's index. An order ends with an update of the
    type `last`. The first failure is raised and cancels the other orders; closing cancels all. The
    backend enforces the deadline; if it hangs, this ends the wait."""
    return within(merge_updates(backend, orders, last), deadline_s + GRACE_S)


async def merge_updates(
    backend: Maker[O, U], orders: Sequence[O], last: type
) -> AsyncGenerator[tuple[int, U]]:
    news: asyncio.Queue[tuple[int, U | Exception]] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_follow(backend, i, order, last, news))
        for i, order in enumerate(orders)
    ]
    left = len(orders)
    try:
        while left:
            index, update = await news.get()
            if isinstance(update, Exception):
                raise update
            left -= isinstance(update, last)
            yield index, update
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(
    backend: Maker[O, U],
    index: int,
    order: O,
    last: type,
    news: asyncio.Queue[tuple[int, Any]],
) -> None:
    try:
        async with aclosing(backend.generate(order)) as updates:
            async for update in updates:
                news.put_nowait((index, update))
                if isinstance(update, last):
                    return
        raise errors.unexpected()
    except Exception as error:
        news.put_nowait((index, error))


# -- server-sent events -----------------------------------------------------------------------


async def stream(
    updates: AsyncGenerator[tuple[int, U]],
    count: int,
    accepted: type,
    describe: Callable[[int, U], bytes],
    describe_error: Callable[[Problem], bytes],
    describe_end: Callable[[], bytes] = bytes,
) -> StreamingResponse:
    """Stream the updates of `count` orders as events. The stream begins when each order has an
    update of the type `accepted`, so that a refusal is an ordinary answer."""
    early, waiting = list[tuple[int, U]](), set(range(count))
    try:
        while waiting:
            index, update = await anext(updates)
            early.append((index, update))
            if isinstance(update, accepted):
                waiting.discard(index)
    except BaseException:
        await updates.aclose()
        raise

    async def described() -> AsyncGenerator[bytes]:
        try:
            async with aclosing(updates):
                for each in early:
                    yield describe(*each)
                async for each in updates:
                    yield describe(*each)
            yield describe_end()
        except Problem as problem:
            yield describe_error(problem)

    return StreamingResponse(
        with_comments(described()), media_type="text/event-stream", headers=SSE_HEADERS
    )


async def with_comments(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the events, and a comment in every long pause: proxies and clients close connections
    that are silent for about a minute."""
    async with aclosing(events), aclosing(patient(events, lambda: COMMENT_S)) as parts:
        async for part in parts:
            if part is NOTHING:
                yield COMMENT
            elif part:
                yield part


def server_event(data: dict[str, Any] | Iterable[bytes], name: str = "") -> bytes:
    """Make an event. `data`: an object, or the parts of its JSON."""
    parts = [json.dumps(data).encode()] if isinstance(data, dict) else data
    head = f"event: {name}\n" if name else ""
    return b"".join([head.encode(), b"data: ", *parts, b"\n\n"])
