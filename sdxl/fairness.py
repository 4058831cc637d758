"""Virtual time: when an image would be done if all clients ran at once, each at the pace of its
weight.

Weighted fair queueing (Demers, Keshav, Shenker, "Analysis and Simulation of a Fair Queueing
Algorithm", SIGCOMM 1989). Each image of a client ends in virtual time by its work after the image
before. A client that returns starts at the present virtual time: being idle gives no credit. The
policy runs the images with the smallest virtual times. It knows no clock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sdxl.flight import Flight, Priority

Account = tuple[Priority, str]
"""A client has a virtual time for each priority, since priorities do not run together."""


def account(flight: Flight) -> Account:
    return flight.priority, flight.client


def begin(flight: Flight) -> float:
    """Return the virtual time of an image's first step."""
    return flight.due - flight.work_s / flight.weight


class VirtualTime:
    """One thread admits images while another ends them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left_at: dict[Account, float] = {}
        """virtual times of clients that are ahead of the present and have no image in flight"""

    def stamped(self, newcomer: Flight, flights: Iterable[Flight]) -> Flight:
        """Return the newcomer with its virtual time. `flights` are all others."""
        peers = [f for f in flights if f.priority == newcomer.priority]
        now = present(peers)
        with self._lock:
            if now is None:
                kept = {a: t for a, t in self._left_at.items() if a[0] != newcomer.priority}
                self._left_at = kept
            left_at = self._left_at.get(account(newcomer), 0.0)
        before = max((f.due for f in peers if f.client == newcomer.client), default=left_at)
        start = max(before, now or 0.0)
        return replace(newcomer, due=start + newcomer.work_s / newcomer.weight)

    def leave(self, gone: Flight, flights: Sequence[Flight]) -> list[Flight]:
        """Return the flights that get earlier virtual times because `gone` leaves unfinished."""
        # A finished flight may return with its later leg.
        unused = 0.0 if gone.is_done else left_of(gone) / gone.weight
        same = [f for f in flights if account(f) == account(gone) and f.id != gone.id]
        if not same:
            self._remember(gone, gone.due - unused, flights)
        return [replace(f, due=f.due - unused) for f in same if unused > 0 and f.due > gone.due]

    def _remember(self, gone: Flight, at: float, flights: Sequence[Flight]) -> None:
        now = present([f for f in flights if f.priority == gone.priority and f.id != gone.id])
        with self._lock:
            self._left_at[account(gone)] = at
            for known, time in list(self._left_at.items()):
                if known[0] == gone.priority and (now is None or time <= now):
                    # A client that returns later starts at the present anyway.
                    del self._left_at[known]


def present(flights: Sequence[Flight]) -> float | None:
    """Return the virtual time of the client that is furthest behind; None without flights."""
    first: dict[str, float] = {}
    done: dict[str, float] = {}
    for flight in flights:
        client = flight.client
        first[client] = min(first.get(client, begin(flight)), begin(flight))
        done[client] = done.get(client, 0.0) + worked_s(flight) / flight.weight
    return min((first[client] + done[client] for client in first), default=None)


def worked_s(flight: Flight) -> float:
    """Return the work of the steps that an image has taken."""
    done = flight.plan.rows_before
    own_s = flight.work_s - (flight.later.work_s if flight.later else 0.0)
    return own_s * done[flight.step] / done[-1]


def left_of(flight: Flight) -> float:
    return flight.work_s - worked_s(flight)
