"""Interrupt a call at every bytecode in turn."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any


def at_every_bytecode(call: Callable[[], object], after: Callable[[], object]) -> int:
    """Interrupt `call` at its first bytecode, then at its second, and so on; call `after` each
    time. Return the number of bytecodes. Python handles signals at only some of these places."""
    # The garbage collector's hooks belong to other libraries and cannot raise.
    gc.disable()
    try:
        for place in count():
            if not interrupted_at(place, call):
                return place
            after()
    finally:
        gc.enable()
    raise AssertionError


def interrupted_at(place: int, call: Callable[[], object]) -> bool:
    seen = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen > place:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@contextmanager
def raising(number: int) -> Iterator[None]:
    """Make this signal interrupt as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)
