"""Whether a service that also has a language model is ready: it waits for the model to start, but
pictures do not wait for one that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from serve.errors import Problem
from serve.llm.asks import TextBackend

STARTING = "starting"


class Readiness:
    def __init__(
        self,
        text: TextBackend,
        start_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._text, self._clock = text, clock
        self._until_s, self._has_started = clock() + start_s, False

    async def state(self) -> str:
        """`ready` or `unavailable`. Raises Problem, 503, while it may still come up first."""
        try:
            await self._text.card()
        except Problem as problem:
            is_first = not self._has_started and self._clock() < self._until_s
            if is_first and problem.code == STARTING:
                raise
            self._has_started = True
            return "unavailable"
        self._has_started = True
        return "ready"
