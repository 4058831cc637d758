"""Work handed to threads: the state after an interrupt at any bytecode."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time

import pytest

from sdxl.handover import WorkThread, apart, in_threads
from tests.interrupts import at_every_bytecode, raising
from tests.waiting import wait_until

SOON_S = 5.0


class Both:
    """Two pieces of work that record whether the second still runs."""

    def __init__(self) -> None:
        self.thread = WorkThread()
        self.is_running = False
        self.begun = 0

    def here(self) -> None:
        time.sleep(0.0005)

    def there(self) -> None:
        self.begun += 1
        self.is_running = True
        try:
            time.sleep(0.001)
        finally:  # done here, where the thread found no time for it, it is interrupted too
            self.is_running = False

    def call(self) -> None:
        self.thread.together(self.here, self.there)

    def check(self) -> None:
        assert not self.is_running, "the other thread works on after the call has ended"
        begun = self.begun
        self.call()
        assert self.begun == begun + 1, "work that was taken back was done all the same"


def test_an_interrupt_at_any_bytecode_waits_for_the_other_thread() -> None:
    both = Both()
    assert at_every_bytecode(both.call, both.check) > 50


@pytest.mark.parametrize("apart_s", [1e-5, 2e-5, 2e-4])
def test_interrupts_that_come_while_the_last_is_handled_wait_for_the_other_thread(
    monkeypatch: pytest.MonkeyPatch, apart_s: float
) -> None:
    # Python prints and drops an interrupt within a destructor; pytest's printing may be hit.
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    both, left = Both(), 0

    def strike(*_: object) -> None:
        nonlocal left
        if left:
            left -= 1
            signal.setitimer(signal.ITIMER_REAL, apart_s if left else 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        for call in range(300):
            left = 5
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.000005 * call)
                both.call()
                left = 0
            except KeyboardInterrupt:
                left = 0
            assert not both.is_running
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    both.check()


def test_an_error_of_either_piece_is_the_calls() -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    thread = WorkThread()
    for pieces in ((fail, time.monotonic), (time.monotonic, fail)):
        with pytest.raises(RuntimeError, match="no memory"):
            thread.together(*pieces)


def test_work_that_the_busy_thread_cannot_take_is_done_by_the_caller() -> None:
    thread, is_free = WorkThread(), threading.Event()
    busy = threading.Thread(target=thread.together, args=(is_free.wait, is_free.wait), daemon=True)
    busy.start()
    done: list[str] = []
    thread.together(lambda: done.append("here"), lambda: done.append("there"))
    assert done == ["here", "there"]
    is_free.set()
    busy.join(SOON_S)


def test_calls_of_several_threads_each_get_their_own() -> None:
    thread = WorkThread()

    def add(number: int) -> list[int]:
        found: list[int] = []
        for _ in range(50):
            thread.together(lambda: found.append(number), lambda: found.append(-number))
        return found

    for number, found in enumerate(in_threads(add, range(8), 4)):
        assert sorted(found) == sorted([number, -number] * 50)


def test_items_come_back_in_order_and_the_first_error_is_raised() -> None:
    def double(number: int) -> int:
        time.sleep(0.001 * (number % 3))
        if number == 20:
            raise ValueError("twenty")
        return 2 * number

    assert list(in_threads(double, range(10), 4)) == [2 * n for n in range(10)]
    with pytest.raises(ValueError, match="twenty"):
        list(in_threads(double, range(30), 4))
    assert list(in_threads(double, [], 4)) == []


def test_an_interrupt_at_any_bytecode_leaves_threads_that_end() -> None:
    before = _thread._count()
    at_every_bytecode(lambda: list(in_threads(abs, range(3), 2)), lambda: None)
    wait_until(lambda: _thread._count() <= before, SOON_S, 0.001)


def test_an_interrupt_stops_work_in_another_thread_and_waits_for_its_end() -> None:
    is_stopped, events = threading.Event(), list[str]()

    def work() -> None:
        is_stopped.wait(SOON_S)
        time.sleep(0.05)
        events.append("ended")

    with raising(signal.SIGALRM), pytest.raises(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        apart(work, is_stopped.set, SOON_S)
    assert events == ["ended"]


def test_work_in_another_thread_returns_and_raises_like_a_call() -> None:
    assert apart(lambda: 3, pytest.fail, SOON_S) == 3
    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 // 0, pytest.fail, SOON_S)


def test_an_interrupt_at_any_bytecode_of_a_threads_work_is_raised_and_nothing_hangs() -> None:
    at_every_bytecode(lambda: apart(lambda: None, lambda: None, SOON_S), lambda: None)
