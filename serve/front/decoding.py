"""Where a front decodes the pictures that clients send: in one thread, one after the other, so that
memory is bounded. A large one takes a hundred megabytes.

It knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class DecodingThread:
    """Who leaves while a picture is decoded lets nobody begin before it is done: a lock around
    threads of asyncio's own would."""

    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "pictures"))

    async def run(self, decode: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, decode)
