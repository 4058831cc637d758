"""A stream of updates that ends at a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from serve import errors

T = TypeVar("T")


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
