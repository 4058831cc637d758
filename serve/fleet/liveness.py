"""Records which replicas answered lately.

Every process that sends work to replicas queries them itself, and so depends on no hanging replica
and not on Ray's controller. It knows no Ray.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator
from threading import Lock

SILENCE_S = 1.5
"""A replica that has not answered for this long comes last, until its next answer."""
MOST_HELD = 50_000
"""Remembered requests; more than a proxy holds."""


class Liveness:
    """The replicas of a deployment, by name. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, Lock()
        self._heard_s: dict[str, float] = {}
        self._lost: set[str] = set()
        self._leaving: set[str] = set()
        self._count = 0
        self._holders: OrderedDict[str, str] = OrderedDict()

    def note_answer(self, name: str) -> None:
        with self._lock:
            self._heard_s[name] = self._clock()
            self._lost.discard(name)

    def note_lost(self, name: str) -> None:
        """Record that the replica or Ray reported the replica's end."""
        with self._lock:
            self._lost.add(name)

    def keep(
        self, names: Collection[str], leaving: Collection[str] = (), count: int | None = None
    ) -> None:
        """Keep only these replicas, which are queried now, of `count` in all. A new replica counts
        as having answered now. `leaving` replicas only finish their requests."""
        with self._lock:
            self._count = len(names) if count is None else count
            now = self._clock()
            self._leaving = set(leaving) - set(names)
            known = (*names, *self._leaving)
            self._heard_s = {name: self._heard_s.get(name, now) for name in known}
            self._lost.intersection_update(known)

    @property
    def count(self) -> int:
        """The number of replicas."""
        return self._count

    def is_silent(self, name: str) -> bool:
        return self.silent_s(name) > SILENCE_S

    def silent_s(self, name: str) -> float:
        """Seconds of silence: infinite for a lost replica, 0 for an unknown one."""
        return math.inf if name in self._lost else self.unheard_s(name)

    def unheard_s(self, name: str) -> float:
        """Seconds since its last answer, also for a lost replica: after one failed call its
        requests stay, since the call may have arrived."""
        with self._lock:
            now = self._clock()
            return now - self._heard_s.get(name, now)

    @property
    def has_silent(self) -> bool:
        return any(self._silences())

    @property
    def has_any(self) -> bool:
        """Whether any replica answers."""
        return not all(self._silences())

    def _silences(self) -> Iterator[bool]:
        """Return for each staying replica whether it is silent."""
        with self._lock:
            names = self._heard_s.keys() - self._leaving
        return map(self.is_silent, names)

    # -- the replica of each request --------------------------------------------------------

    def note_holder(self, request: str, name: str) -> None:
        with self._lock:
            self._holders[request] = name
            self._holders.move_to_end(request)
            while len(self._holders) > MOST_HELD:
                self._holders.popitem(last=False)

    def forget(self, request: str) -> None:
        """Forget the replica of this request."""
        with self._lock:
            self._holders.pop(request, None)

    @property
    def holders(self) -> set[str]:
        """Replicas that have requests."""
        with self._lock:
            return set(self._holders.values())

    def holder(self, request: str) -> str | None:
        with self._lock:
            return self._holders.get(request)


_BY_DEPLOYMENT: defaultdict[str, Liveness] = defaultdict(Liveness)


def of_deployment(name: str) -> Liveness:
    """Return this process's Liveness of a deployment, which Ray's routers and senders share."""
    return _BY_DEPLOYMENT[name]
