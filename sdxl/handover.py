"""Runs work on another thread for a caller that may be interrupted at any bytecode.

Futures, executors, events and `Thread.start` are Python code around a lock: an interrupt inside
leaves the lock held, and the next thread waits for ever. The threads here share only operations
that are atomic in C: a SimpleQueue, `dict.setdefault`, the start of a thread, and a lock of the C
library, whose wait continues after a signal. The threads end with the process.
"""

from __future__ import annotations

import ctypes
import operator
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")
CALLER, THREAD = "caller", "thread"
_LIBC = ctypes.CDLL(None)
_LOCK_BYTES = 256  # more than a pthread_rwlock_t of any system


class HandedWork(Generic[T]):
    """A call that runs once, on the thread or in the caller."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._taken: dict[str, str] = {}
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._is_over = False
        self._answer: list[T] = []
        self._error: BaseException | None = None
        lock = ctypes.create_string_buffer(_LOCK_BYTES)
        _LIBC.pthread_rwlock_init(lock, None)
        self._hold = partial(_LIBC.pthread_rwlock_wrlock, lock)
        self._hold_shared = partial(_LIBC.pthread_rwlock_rdlock, lock)
        self._let_go = partial(_LIBC.pthread_rwlock_unlock, lock)

    def take(self, side: str) -> bool:
        """Claim the work for a side. Return True if that side was the first to claim it."""
        return self._taken.setdefault("by", side) == side

    def run(self) -> None:
        """Do the work on the thread, unless the caller has taken it back."""
        self._hold()
        try:
            if self.take(THREAD):
                self._do()
        finally:
            self._let_go()

    def _do(self) -> None:
        try:
            self._answer.append(self._call())
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._ended.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread and return True once it is done. An interrupt is raised at once."""
        while not self._is_over:
            try:
                self._ended.get(timeout=timeout_s)
            except Empty:
                return False
        return True

    def settling(self) -> Callable[[], object]:
        """Return a call that takes the work back or, if the thread has begun, waits for the thread.
        It is one C call, so no interrupt comes between its steps or ends its wait."""
        steps = (partial(self._taken.setdefault, "by", CALLER), self._hold_shared, self._let_go)
        return partial(deque, map(operator.call, steps), 0)

    def result(self) -> T:
        """Return the result of finished work, or do the work in the caller."""
        if self.take(CALLER):
            return self._call()
        if self._error is not None:
            raise self._error
        return self._answer[0]


class WorkThread:
    """A thread with a queue of work."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[HandedWork[None]] = SimpleQueue()
        start_new_thread(self._run, ())

    def together(self, here: Callable[[], None], there: Callable[[], None]) -> None:
        """Run both at once, `there` on the thread, or in the caller if the thread has not begun it.
        Both have ended when this returns or raises."""
        work = HandedWork(there)
        settle, settle_again = work.settling(), work.settling()
        try:
            try:
                self._inbox.put(work)
                here()
            finally:
                settle()
        finally:
            # A debugger can interrupt just before the call above; Python itself cannot.
            settle_again()
        work.result()

    def _run(self) -> None:
        while True:
            self._inbox.get().run()


def in_threads(do: Callable[[U], T], items: Sequence[U], threads: int) -> Iterator[T]:
    """Yield the results of `do` in order. An interrupt or error starts no further item and does
    not wait for running ones."""
    works = [HandedWork(partial(do, item)) for item in items]
    inbox: SimpleQueue[HandedWork[T] | None] = SimpleQueue()

    def run() -> None:
        while (work := inbox.get()) is not None:
            work.run()

    for work in works:
        inbox.put(work)
    for _ in range(min(threads, len(works))):
        inbox.put(None)
        start_new_thread(run, ())
    try:
        for work in works:
            work.wait()
            yield work.result()
    finally:
        for work in works:
            work.take(CALLER)


def apart(call: Callable[[], T], stop: Callable[[], None], leave_s: float) -> T:
    """Run `call` on its own thread, which interrupts do not reach. An interrupt of the caller calls
    `stop` and is raised when the work ends, or after `leave_s`; a second one is raised at once."""
    work = HandedWork(call)
    try:
        start_new_thread(work.run, ())
        work.wait()
    except BaseException:
        stop()
        if not work.take(CALLER):
            work.wait(leave_s)
        raise
    return work.result()
