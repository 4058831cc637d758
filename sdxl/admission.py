"""Admission: whether a request is accepted, and if not, why and when to retry.

Replicas and library loops decide here. Work is measured in seconds of the device, for each client:

- the queue: a client may have `limits.queue` standard images waiting, fewer if others wait too. No
  client can fill the queue, so a new client always finds room (dynamic thresholds: Choudhury,
  Hahne, IEEE/ACM Transactions on Networking 6(2), 1998);
- deadlines: a picture that would be late is refused, and further requests of a client leave time
  for one more client;
- promises: no newcomer makes another picture miss its deadline.

Only the callers' virtual time is changed. It knows no tensors, no clock and no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sdxl.cost import Costs, all_ready_s, project
from sdxl.fairness import VirtualTime, left_of
from sdxl.flight import Flight, State
from sdxl.policy import Limits

Reason = Literal["queue_full", "too_late", "others_first"]
NEWCOMER_WEIGHT = 1.0
"""weight of the future client that deadlines leave time for"""


class Refused(RuntimeError):
    """A refused request, with the seconds to wait before a retry."""

    def __init__(self, message: str, retry_after_s: float, reason: Reason) -> None:
        super().__init__(message)
        self.retry_after_s, self.reason = retry_after_s, reason

    def __reduce__(self) -> Any:
        return Refused, (str(self), self.retry_after_s, self.reason)


def is_same_request(one: Flight, other: Flight) -> bool:
    return bool(one.request_id) and (one.client, one.request_id) == (other.client, other.request_id)


@dataclass(frozen=True)
class Admission:
    """The state of one device when a request arrives."""

    flights: Sequence[Flight]
    """accepted images that are not done"""
    limits: Limits
    costs: Costs
    now: float
    delay_s: float = 0.0
    """seconds before a newcomer's first step, such as for encoding its prompt"""

    def admit(self, newcomer: Flight, time: VirtualTime) -> Flight:
        """Return the newcomer with its work and its place in the queue, or raise Refused."""
        newcomer = self._measured(newcomer)
        self.check_queue(newcomer)
        self._check_reserve(newcomer)
        return self._placed(time.stamped(newcomer, self.flights))

    def ready_s(self, newcomer: Flight) -> float:
        """Predict when the newcomer would be ready behind all flights."""
        behind = self._behind_all(newcomer)
        return self._project(behind, [behind.id])[behind.id] + self.delay_s

    def waiting(self, newcomer: Flight) -> list[Flight]:
        """Return the waiting flights that are at least as urgent as the newcomer."""
        return [
            f for f in self.flights if f.state is State.QUEUED and f.priority <= newcomer.priority
        ]

    # -- checks -----------------------------------------------------------------------------

    def check_queue(self, newcomer: Flight) -> None:
        """Raise Refused if the queue is full. A request's first picture decides for all."""
        waiting = [f for f in self.waiting(newcomer) if not is_same_request(f, newcomer)]
        images: dict[str, float] = {}
        for flight in waiting:
            images[flight.client] = images.get(flight.client, 0.0) + flight.images
        waiting_images = images.get(newcomer.client, 0.0)
        # Images of a large request above the bound take no room from other clients.
        free = 2 * self.limits.queue - sum(min(n, self.limits.queue) for n in images.values())
        if waiting_images < newcomer.weight * free:
            return
        owners = "all clients" if free <= 0 else "this client"
        count = sum(f.client == newcomer.client for f in waiting) if free > 0 else len(waiting)
        # The first end frees a place; the images that wait now begin first.
        retry_s = max(self._first_end_s() - self.now, 0.0) + sum(f.work_s for f in waiting)
        raise Refused(f"the queue is full ({count} images of {owners} wait)", retry_s, "queue_full")

    def _check_reserve(self, newcomer: Flight) -> None:
        """Raise Refused if a client's further request leaves no time for one more client. Otherwise
        the first client would be promised all of the device's time."""
        ahead = [f for f in self.flights if f.priority <= newcomer.priority]
        of_client = [f for f in ahead if f.client == newcomer.client]
        # A library loop has no request ids and no other clients.
        has_others = not all(is_same_request(f, newcomer) for f in of_client)
        if math.isinf(newcomer.deadline_s) or not (newcomer.request_id and has_others):
            return
        left_s: dict[str, float] = {}
        weights: dict[str, float] = {}
        for flight in ahead:
            left_s[flight.client] = left_s.get(flight.client, 0.0) + left_of(flight)
            weights[flight.client] = flight.weight
        own_s = left_s.pop(newcomer.client) + newcomer.work_s
        pace_s = own_s / newcomer.weight
        others_s = sum(min(s, pace_s * weights[client]) for client, s in left_s.items())
        self._check_time(newcomer, self.now + own_s + others_s + pace_s * NEWCOMER_WEIGHT)

    def _check_time(self, newcomer: Flight, ready_s: float) -> None:
        if ready_s > newcomer.deadline_s:
            raise Refused(
                f"ready in {ready_s - self.now:.2f} s, "
                f"the deadline is in {newcomer.deadline_s - self.now:.2f} s",
                ready_s - newcomer.deadline_s,
                "too_late",
            )

    def _placed(self, newcomer: Flight) -> Flight:
        """Return the newcomer in the first of three places that keeps every promise: in turn, in
        turn without pausing others, behind all others."""
        timed = {f.id for f in (newcomer, *self.flights) if f.deadline_s < math.inf}
        if not timed or self._is_no_hurry(newcomer):
            return newcomer
        places = (newcomer, replace(newcomer, is_last=True), self._behind_all(newcomer))
        for place in places:
            after = self._project(place, timed)
            if not self._breaks(after):
                self._check_own(place, after)
                return place
        self._check_own(place, after)
        retry_s = after.get(newcomer.id, self._first_end_s()) - self.now
        raise Refused("another image's promised time would be missed", retry_s, "others_first")

    def _is_no_hurry(self, newcomer: Flight) -> bool:
        """True if all images would be ready in time in any order: no projection is needed."""
        flights = (*self.flights, newcomer)
        ready_s = all_ready_s(flights, self.limits, self.costs, self.now) + self.delay_s
        return ready_s <= min(f.deadline_s for f in flights)

    def _check_own(self, newcomer: Flight, after: dict[int, float]) -> None:
        if newcomer.deadline_s < math.inf:
            self._check_time(newcomer, after[newcomer.id] + self.delay_s)

    def _breaks(self, after: dict[int, float]) -> bool:
        """True if the newcomer would make a flight late."""
        late = [f for f in self.flights if f.deadline_s < after.get(f.id, -math.inf)]
        if not late:
            return False
        before = project(self.flights, self.limits, self.costs, self.now, [f.id for f in late])
        return any(before[f.id] <= f.deadline_s for f in late)

    def _behind_all(self, newcomer: Flight) -> Flight:
        last = max((f.due for f in self.flights), default=0.0)
        return replace(newcomer, due=max(newcomer.due, last), is_last=True)

    # -- helpers of the checks --------------------------------------------------------------

    def _measured(self, flight: Flight) -> Flight:
        if flight.later is not None:
            later_s = flight.later.delay_s + self.costs.work_s(flight.next_leg, self.limits)
            flight = replace(flight, later=replace(flight.later, work_s=later_s))
        standard, work_s = self.limits.standard, self.costs.work_s(flight, self.limits)
        unit_s = self.costs.work_s(standard, self.limits) if standard else 0.0
        return replace(flight, work_s=work_s, images=work_s / unit_s if unit_s else 1.0)

    def _first_end_s(self) -> float:
        """Predict when the first running flight is done and frees a place."""
        running = [f for f in self.flights if f.state is not State.QUEUED]
        ends = project(running, self.limits, self.costs, self.now).values()
        return min(ends, default=self.now)

    def _project(self, newcomer: Flight, of: Collection[int]) -> dict[int, float]:
        return project((*self.flights, newcomer), self.limits, self.costs, self.now, of)
