"""Finished shards are packed one after another beside the driver, which goes on meanwhile.

What waits is a shard's number. A crash loses nothing: the next start is told of every shard again.
It does not know what packing is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Packer:
    """Its methods are the driver's to call, from one thread."""

    def __init__(self, pack: Callable[[int], None]) -> None:
        self._pack = pack
        self._waiting: SimpleQueue[int | None] = SimpleQueue()
        self._error: Exception | None = None
        self._added = self._packed = 0
        self._is_left = False
        # It ends with the process: a store that hangs must not hold that up.
        self._thread = threading.Thread(target=self._run, name="packer", daemon=True)
        self._thread.start()

    def add(self, shard: int) -> None:
        self._added += 1
        self._waiting.put(shard)

    def is_done(self) -> bool:
        """With all that was added. Raises what packing raised."""
        if self._error is not None:
            raise self._error
        return self._packed == self._added

    def leave(self, timeout_s: float) -> None:
        """Begin no more, and wait for the one under way."""
        self._is_left = True
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (shard := self._waiting.get()) is not None and not self._is_left:
            try:
                self._pack(shard)
            except Exception as error:
                self._error = error
                return
            self._packed += 1
