"""Ends a stream of updates if its sender hangs, or at a deadline.

A replica checks itself between its updates. The receiver uses liveness.py to detect a stopped
process, a blocked event loop or a dead connection: heartbeats in every stream would cost a message
for every order and second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from serve import errors

T = TypeVar("T")
CHECK_S = 1.0
"""A busy replica checks itself at least this often."""
SILENCE_S = 2.5
"""A replica that is silent for this long counts as hanging."""
LOOK_S = 0.5
"""How often a hanging replica is checked again while no other could take over."""


class Silent(Exception):
    """The replica was silent for SILENCE_S, and another could take over."""


async def with_checks(updates: AsyncGenerator[T], check: Callable[[], None]) -> AsyncGenerator[T]:
    """Yield `updates` while `check` does not raise."""
    async with aclosing(updates), aclosing(patient(updates, lambda: CHECK_S)) as news:
        async for update in news:
            if update is NOTHING:
                check()
            else:
                yield update


async def while_alive(
    updates: AsyncIterator[T], silent_s: Callable[[], float], may_leave: Callable[[], bool]
) -> AsyncGenerator[T]:
    """Yield `updates`. Raise Silent if neither an update nor, by `silent_s`, another answer came
    for SILENCE_S, and `may_leave`: without another replica, waiting is better."""
    heard_s = time.monotonic()

    def left_s() -> float:
        """Return the seconds until the sender counts as hanging."""
        return SILENCE_S - min(time.monotonic() - heard_s, silent_s())

    def wait_s() -> float:
        left = left_s()
        return left if left > 0 else LOOK_S

    async with aclosing(patient(updates, wait_s)) as news:
        async for update in news:
            if update is not NOTHING:
                heard_s = time.monotonic()
                yield update
            elif left_s() <= 0 and may_leave():
                raise Silent


async def within(updates: AsyncGenerator[T], deadline_s: float) -> AsyncGenerator[T]:
    """Yield `updates`; if they do not end before the deadline, close them and raise Problem."""
    until_s = asyncio.get_running_loop().time() + deadline_s
    async with aclosing(updates):
        while True:
            try:
                async with asyncio.timeout_at(until_s):
                    update = await anext(updates)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise errors.late() from None
            yield update


NOTHING: Any = object()


async def patient(updates: AsyncIterator[Any], wait_s: Callable[[], float]) -> AsyncGenerator[Any]:
    """Yield each update, and NOTHING after each pause of this length."""
    while True:
        news = asyncio.ensure_future(anext(updates))
        try:
            while not (await asyncio.wait({news}, timeout=wait_s()))[0]:
                yield NOTHING
            update = news.result()
        except StopAsyncIteration:
            return
        finally:
            await _end(news)
        yield update


async def _end(task: asyncio.Future[Any]) -> None:
    """Wait until the task has released the updates, so that they can be closed. Further
    cancellations do not end the wait: anyio repeats them until a task is over."""
    is_cancelled = False
    task.cancel()
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
