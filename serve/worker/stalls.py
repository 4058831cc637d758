"""Detects hanging engine calls by the usual time of their kind.

It knows no engines: callers mark a call's begin and end, and any thread may check for a stall.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

STALL_S = 3.0
"""The least limit; longer than any pause of a busy machine."""
TIMES = 20.0
"""A call hangs if it takes this many times its kind's usual time."""
FIRST_S = 60.0
"""The limit of a kind's first call, which may compile, capture or tune."""


class Unhealthy(RuntimeError):
    """The engines do not work, or no longer return."""


def patience_s(usual_s: float | None, stall_s: float, alike_s: float = 0.0) -> float:
    """Return the limit of a call. `usual_s` is None for a new kind; then `alike_s`, the time of
    similar kinds, counts."""
    return max(max(FIRST_S, TIMES * alike_s) if usual_s is None else TIMES * usual_s, stall_s)


class Calls:
    """The calls of one thread."""

    def __init__(self, what: str, clock: Callable[[], float], stall_s: float) -> None:
        self.what, self._clock, self._stall_s = what, clock, stall_s
        self._longest_s: dict[Hashable, float] = {}
        self._open: tuple[Hashable, float] | None = None

    def expect(self, kind: Hashable, seconds: float) -> None:
        """Set a kind's usual time from another measurement."""
        self._longest_s[kind] = seconds

    @contextmanager
    def watch(self, kind: Hashable) -> Iterator[None]:
        self._open = kind, self._clock()
        try:
            yield
            took_s = self._clock() - self._open[1]
            self._longest_s[kind] = max(took_s, self._longest_s.get(kind, 0.0))
        finally:
            self._open = None

    def check(self) -> None:
        """Raises Unhealthy."""
        if (call := self._open) is None:
            return
        kind, began_s = call
        took_s = self._clock() - began_s
        known = self._longest_s
        alike_s = max(known.values(), default=0.0)
        allowed_s = patience_s(known.get(kind), self._stall_s, alike_s)
        if took_s > allowed_s:
            raise Unhealthy(f"{self.what} has not ended after {took_s:.1f} s")
