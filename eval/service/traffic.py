"""Open and closed loops of requests. It knows no HTTP: the caller sends the requests."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Send = Callable[[int, float], Coroutine[Any, Any, T]]
"""takes a request's number and its arrival on time.perf_counter"""


async def open_loop(send: Send[T], rate: float, seconds: float) -> list[T]:
    """Send at Poisson arrivals, without waiting for answers. Returns the answers by arrival."""
    rng, tasks = random.Random(0), list[asyncio.Task[T]]()
    began_s, due = time.perf_counter(), 0.0
    while (due := due + rng.expovariate(rate)) < seconds:
        due_s = began_s + due
        await asyncio.sleep(max(due_s - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(send(len(tasks), due_s)))
    return list(await asyncio.gather(*tasks))


async def closed_loop(send: Send[T], clients: int, seconds: float) -> list[T]:
    """Keep `clients` requests under way: each client sends the next one after an answer."""
    until_s, numbers = time.perf_counter() + seconds, itertools.count()

    async def run_client() -> list[T]:
        answers = []
        while (now := time.perf_counter()) < until_s:
            answers.append(await send(next(numbers), now))
        return answers

    answers = await asyncio.gather(*(run_client() for _ in range(clients)))
    return [answer for each in answers for answer in each]
