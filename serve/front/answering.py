"""What answers of pictures and of text share: deadlines, a key's limits, how a stream begins."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from serve import errors
from serve.deadlines import within
from serve.errors import Problem
from serve.fleet.beats import NOTHING, patient
from serve.front.keys import ApiKey, RateLimiter
from serve.settings import ServeSettings

DEADLINE_HEADER = "x-deadline-s"
GRACE_S = 5.0
"""How long after a deadline the backend is believed to be about to say so itself."""
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
"""of every stream; `itemSchema`, of OpenAPI 3.2, is where readers of 3.1 look for one event too"""

T = TypeVar("T")
U = TypeVar("U")


def deadline_of(
    asked_s: float | None, request: Request, settings: ServeSettings, *, is_patient: bool = False
) -> float:
    """In the body, else in a header, else the service's own, which `is_patient` has none of."""
    seconds = asked_s
    text = request.headers.get(DEADLINE_HEADER)
    if seconds is None and text is not None:
        try:
            # Python reads 1_0 as 10.
            seconds = -1.0 if "_" in text else float(text)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < float("inf"):
            raise errors.invalid(DEADLINE_HEADER, f"{DEADLINE_HEADER}: needed seconds above 0")
    if seconds is None and is_patient:
        return math.inf
    return min(seconds or settings.deadline_s, settings.max_deadline_s)


def take_rate(limiter: RateLimiter, request: Request, count: int, work: float = 0.0) -> None:
    """Of pictures, or of answers; both count alike. `work` is in standard images."""
    key: ApiKey | None = getattr(request.state, "key", None)
    if key is None:
        return
    limit, wait_s = limiter.take(key, count, work)
    if wait_s > 0:
        raise Problem(429, f"The key's limit is {limit}.", None, "rate_limit_exceeded", wait_s)


def in_time(updates: AsyncGenerator[T], deadline_s: float) -> AsyncGenerator[T]:
    """The backend keeps deadlines; should it hang, they hold all the same."""
    return within(updates, deadline_s + GRACE_S)


async def taken_on(
    updates: AsyncGenerator[tuple[int, U]], count: int, taken: type
) -> list[tuple[int, U]]:
    """What came until every order was taken on, which an update of the type `taken` says: only
    then does a stream begin, so that a refusal is an answer of its own."""
    early: list[tuple[int, U]] = []
    waited_for = set(range(count))
    try:
        while waited_for:
            index, update = await anext(updates)
            early.append((index, update))
            waited_for -= {index} if isinstance(update, taken) else set()
    except BaseException:
        await updates.aclose()
        raise
    return early


async def commented(text: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """`text`, and a comment, which clients pass over, wherever it pauses: proxies and clients take
    a connection for dead on which nothing comes for a minute or so."""
    async with aclosing(text), aclosing(patient(text, lambda: COMMENT_S)) as parts:
        async for part in parts:
            yield COMMENT if part is NOTHING else part


def event_stream(text: AsyncIterator[bytes] | AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(text, media_type="text/event-stream", headers=SSE_HEADERS)
