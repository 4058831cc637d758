"""Returns the memory of large bodies to the system: glibc keeps freed memory."""

from __future__ import annotations

import asyncio

from sdxl.memory import trim

LARGE_BYTES = 1 << 20
DELAY_S = 1.0
"""Other processes and tasks release a body shortly after its request ended."""


class Trimming:
    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self, freed: int) -> None:
        """Trim once for all large bodies that are freed within the delay."""
        if freed >= LARGE_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._trim)

    def _trim(self) -> None:
        self._timer = None
        trim()
