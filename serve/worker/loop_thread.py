"""A thread that runs a loop of engine calls, for pictures or for text.

Other threads send functions to its inbox; it runs them between two passes.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from serve.worker.stalls import Unhealthy

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""Period of an idle loop's passes, which show that the thread works."""
SICK_AFTER = 3
"""The engines count as broken after this many consecutive passes with only failed calls."""


class Loop(Protocol):
    @property
    def is_idle(self) -> bool: ...
    def advance(self) -> None:
        """Do one pass; do nothing if idle."""
        ...

    def fail_all(self, cause: Exception) -> None:
        """Fail everything that waits, because `advance` or a message raised."""
        ...


class LoopThread:
    def __init__(self, name: str, loop: Loop, clock: Callable[[], float]) -> None:
        self.name, self._loop, self._clock = name, loop, clock
        self.beat_s = clock()
        """start of the last pass"""
        self._failures = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._death: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.beat_s = self._clock()
        self._thread.start()

    def send(self, message: Callable[[], None]) -> None:
        self._inbox.put(message)

    def record_calls(self, *, has_failed: bool) -> None:
        """Record whether a pass had only failed engine calls."""
        self._failures = self._failures + 1 if has_failed else 0

    def check(self) -> None:
        """Raises Unhealthy."""
        if self._death is not None:
            raise Unhealthy(f"the {self.name}'s loop died: {type(self._death).__name__}")
        if self._failures >= SICK_AFTER:
            raise Unhealthy(f"the {self.name}'s engines failed {self._failures} times in a row")

    def stop(self, timeout_s: float | None = None) -> None:
        """Finish the sent and current work, then end the thread."""
        self._is_stopping = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not (self._is_stopping and self._inbox.empty() and self._loop.is_idle):
                self._read_inbox()
                self.beat_s = self._clock()
                self._loop.advance()
        except Exception as death:
            log.exception("the %s's loop died", self.name)
            self._death = death
            self._loop.fail_all(Unhealthy(f"the {self.name}'s loop died"))

    def _read_inbox(self) -> None:
        try:
            message = self._inbox.get(self._loop.is_idle, BEAT_S)
            while True:
                message()
                message = self._inbox.get_nowait()
        except queue.Empty:
            pass
