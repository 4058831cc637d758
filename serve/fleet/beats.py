"""Signs of life in a stream of updates: a replica that has nothing new to say says so.

Whoever listens can then tell one that works from one that hangs, whatever the reason: a stopped
process, a blocked event loop, a connection that swallows everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
BEAT_S = 1.0
"""A replica at work speaks at least this often."""
SILENCE_S = 2.5
"""One that has not spoken for so long is taken to hang."""


class Silent(Exception):
    """Nothing was heard for SILENCE_S, and somebody else could take over."""


@dataclass(frozen=True)
class Alive:
    """Nothing new, and all is well."""


async def with_beats(
    updates: AsyncGenerator[T], check: Callable[[], None]
) -> AsyncGenerator[T | Alive]:
    """`updates`, and between them signs of life for as long as `check` does not raise."""
    async with aclosing(updates), aclosing(patient(updates, BEAT_S)) as news:
        async for update in news:
            if update is NOTHING:
                check()
            yield Alive() if update is NOTHING else update


async def without_beats(
    updates: AsyncIterator[T | Alive], may_leave: Callable[[], bool]
) -> AsyncGenerator[T]:
    """What is new in `updates`. Raises Silent where nothing at all comes any more, if `may_leave`:
    where nobody else could take over, waiting is better."""
    async with aclosing(patient(updates, SILENCE_S)) as news:
        async for update in news:
            if update is NOTHING and may_leave():
                raise Silent
            if update is not NOTHING and not isinstance(update, Alive):
                yield update


NOTHING: Any = object()


async def patient(updates: AsyncIterator[Any], wait_s: float) -> AsyncGenerator[Any]:
    """Each update, and NOTHING whenever none came for so long."""
    while True:
        news = asyncio.ensure_future(anext(updates))
        try:
            while not (await asyncio.wait({news}, timeout=wait_s))[0]:
                yield NOTHING
            update = news.result()
        except StopAsyncIteration:
            return
        finally:
            await _end(news)
        yield update


async def _end(task: asyncio.Future[Any]) -> None:
    """It holds what `patient` was given, which nobody can close before: whoever is cancelled again
    meanwhile, as anyio does it until a task is over, waits all the same."""
    is_cancelled = False
    task.cancel()
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
