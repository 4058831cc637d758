"""Work handed to another thread by a caller whom an interrupt may strike at any bytecode.

Futures, executors, events and `Thread.start` are Python code around a lock: an interrupt inside
leaves the lock held, and whoever needs it next waits for ever. Here the threads share only what C
does whole or not at all: a SimpleQueue, a dict's `setdefault`, the start of a thread, a lock of the
C library's, whose wait goes on through a signal. Such a thread ends with the process. It does not
know what the work is.
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

    def take(self, who: str) -> bool:
        """Whether it is theirs to do: of whoever asks first, however often they ask."""
        return self._taken.setdefault("by", who) == who

    def run(self) -> None:
        """On the thread. Nothing is done that the caller has taken back."""
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
        """Until the thread is done with it; an interrupt is raised at once."""
        while not self._is_over:
            try:
                self._ended.get(timeout=timeout_s)
            except Empty:
                return False
        return True

    def settling(self) -> Callable[[], object]:
        """Takes it back or, if the thread has begun, waits until it is done. All of that is one
        call of C, between whose steps no interrupt comes, and a wait that none of them ends."""
        steps = (partial(self._taken.setdefault, "by", CALLER), self._hold_shared, self._let_go)
        return partial(deque, map(operator.call, steps), 0)

    def result(self) -> T:
        """Of work that is over, or else of doing it here."""
        if self.take(CALLER):
            return self._call()
        if self._error is not None:
            raise self._error
        return self._answer[0]


class WorkThread:
    """Does one after the other what it is handed."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[HandedWork[None]] = SimpleQueue()
        start_new_thread(self._run, ())

    def together(self, here: Callable[[], None], there: Callable[[], None]) -> None:
        """Both at the same time, `there` on the thread, or here if that finds no time for it. When
        this returns or raises, neither runs any more."""
        work = HandedWork(there)
        settle, settle_again = work.settling(), work.settling()
        try:
            try:
                self._inbox.put(work)
                here()
            finally:
                settle()
        finally:
            # Python lets no interrupt in just before the one above; a debugger does.
            settle_again()
        work.result()

    def _run(self) -> None:
        while True:
            self._inbox.get().run()


def in_threads(do: Callable[[U], T], items: Sequence[U], threads: int) -> Iterator[T]:
    """What `do` makes of every item, in order. After an interrupt or an error nothing more is
    begun, and nobody waits for what has been."""
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
    """Do it on a thread of its own, where no interrupt strikes. One that strikes here calls `stop`
    and is raised when the work has ended, or after so many seconds; a second one at once."""
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
