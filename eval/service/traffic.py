"""Load as a service meets it: requests that come when they come, or so many at a time.

It knows no HTTP: what a request is, and what became of it, is the caller's.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Ask = Callable[[int, float], Coroutine[Any, Any, T]]
"""of a request's number, and when it is due on time.perf_counter"""


async def open_loop(ask: Ask[T], rate: float, seconds: float, seed: int = 0) -> list[T]:
    """Poisson arrivals: they do not wait for answers. In the order in which they were due."""
    drawn, tasks = random.Random(seed), list[asyncio.Task[T]]()
    began_s, due = time.perf_counter(), 0.0
    while (due := due + drawn.expovariate(rate)) < seconds:
        due_s = began_s + due
        await asyncio.sleep(max(due_s - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(ask(len(tasks), due_s)))
    return list(await asyncio.gather(*tasks))


async def closed_loop(ask: Ask[T], clients: int, seconds: float) -> list[T]:
    """Always the same number under way, each client asking again as soon as it is answered."""
    until_s, numbers = time.perf_counter() + seconds, itertools.count()

    async def follow() -> list[T]:
        found = []
        while (now := time.perf_counter()) < until_s:
            found.append(await ask(next(numbers), now))
        return found

    found = await asyncio.gather(*(follow() for _ in range(clients)))
    return [each for every in found for each in every]
