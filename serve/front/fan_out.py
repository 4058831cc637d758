"""Several orders at once, their updates in one stream; together they are made, or none is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from serve import errors
from serve.orders import Done

O_contra = TypeVar("O_contra", contravariant=True)
O = TypeVar("O")  # noqa: E741
U = TypeVar("U")
U_co = TypeVar("U_co", covariant=True)


class Maker(Protocol[O_contra, U_co]):
    """An ImageBackend, or a TextBackend."""

    def generate(self, order: O_contra, /) -> AsyncGenerator[U_co]: ...


async def fan_out(
    backend: Maker[O, U], orders: Sequence[O], last: type = Done
) -> AsyncGenerator[tuple[int, U]]:
    """An order ends with an update of the type `last`. Ends when every order is done; raises what
    the first to fail raised, and cancels the others, as closing it does."""
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


async def in_order(
    early: Sequence[tuple[int, U]], updates: AsyncGenerator[tuple[int, U]]
) -> AsyncGenerator[tuple[int, U]]:
    """What came before the answer began, then the rest; closing it closes `updates`."""
    async with aclosing(updates):
        for each in early:
            yield each
        async for each in updates:
            yield each


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
