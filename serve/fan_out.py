"""Several orders at once, their updates in one stream; together they are made, or none is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from serve import errors
from serve.orders import Done, ImageBackend, Order, Update

News = tuple[int, Update | Exception]


async def fan_out(
    backend: ImageBackend, orders: Sequence[Order]
) -> AsyncGenerator[tuple[int, Update]]:
    """Ends when every order is done; raises what the first to fail raised, and cancels the others,
    as closing it does."""
    news: asyncio.Queue[News] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_follow(backend, i, order, news)) for i, order in enumerate(orders)
    ]
    left = len(orders)
    try:
        while left:
            index, update = await news.get()
            if isinstance(update, Exception):
                raise update
            left -= isinstance(update, Done)
            yield index, update
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(
    backend: ImageBackend, index: int, order: Order, news: asyncio.Queue[News]
) -> None:
    try:
        async with aclosing(backend.generate(order)) as updates:
            async for update in updates:
                news.put_nowait((index, update))
                if isinstance(update, Done):
                    return
        raise errors.unexpected()
    except Exception as error:
        news.put_nowait((index, error))
