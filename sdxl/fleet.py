"""Routing and scaling: which replica gets an image, and how many replicas are needed.

Pure decisions over the load that replicas report. serve/fleet uses them, and so does the simulation
of `sdxl bench fleet`. It knows no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdxl.admission import Admission
from sdxl.cost import project
from sdxl.flight import Flight

ASK_PERIOD_S, ASKED = 0.25, 128
"""The period in which a router asks replicas for their load, and the most replicas that it asks, at
random. So its work does not grow with the fleet."""
STALE_S = 1.0
"""A replica's reported load is used for this long."""
CHOICES = 6
"""The replicas that a router compares for an image, at random. Routers have old reports: if they
compared all replicas, they would all choose the same (Mitzenmacher, "How Useful Is Old
Information?", TPDS 2000)."""
HOMES, SPILL_S = 32, 0.2
"""The replicas that keep a file of requests, in order. The first of them gets the image unless the
image would be ready SPILL_S earlier elsewhere, so more replicas load a popular file."""
USED_SHARE = 0.8
"""the used share of a replica's time above which another replica is needed, as queues grow fast"""
WORK, QUEUE_S = "work", "queue_s"
"""Reported for scaling: the device's seconds of work that arrive each second, and that wait."""

Array = Any
"""a numpy array of any shape"""


@dataclass(frozen=True)
class Outlook:
    """A replica's report to routers, in terms of a standard image."""

    ready_in_s: float
    """seconds until one more image would be ready"""
    alone_s: float
    """seconds of an image on an idle device"""
    each_s: float
    """seconds of the device for each further image"""

    @classmethod
    def of(cls, admission: Admission, standard: Flight) -> Outlook:
        limits, costs = admission.limits, admission.costs
        alone_s = project([standard], limits, costs, 0.0)[standard.id]
        ready_s = admission.ready_s(standard) - admission.now
        return cls(ready_s, alone_s, costs.work_s(standard, limits))


class Loads:
    """The latest reports of all replicas, and the images sent since, as arrays. `places` are
    indices of replicas, in any shape."""

    def __init__(self, count: int) -> None:
        # A new replica has no report, so only the images sent to it count.
        self.known_s, self.ready_in_s, self.alone_s = np.zeros((3, count))
        self.each_s, self.sent = np.ones(count), np.zeros(count)

    def copy(self, place: int, other: Loads, its_place: int) -> None:
        for name, values in vars(self).items():
            values[place] = vars(other)[name][its_place]

    def report(self, places: Array, now: Array, outlooks: Array, included: Array) -> None:
        """Store reports. `outlooks`: the fields of Outlook, each in the shape of `places`.
        `included`: the number of sent images that each report includes."""
        self.known_s[places] = now
        self.ready_in_s[places], self.alone_s[places], self.each_s[places] = outlooks
        self.sent[places] -= included

    def ready(self, places: Array, now: float) -> Array:
        """Return the seconds until one more image would be ready."""
        left_s = self.ready_in_s[places] - (now - self.known_s[places])
        return np.maximum(left_s, self.alone_s[places]) + self.sent[places] * self.each_s[places]

    def candidates(
        self, places: Array, now: float, kept: Array, loading_s: Array, rng: np.random.Generator
    ) -> tuple[Array, Array]:
        """Return the replicas to compare for each image, and when the image would be ready there; a
        row for each image. `places`: replicas with reports. `kept`: replicas that keep the image's
        file, which others load in `loading_s`."""
        rows, count = places.shape
        if count > CHOICES:
            drawn = rng.integers(count, size=(rows, CHOICES))
            places = places[np.arange(rows)[:, None], drawn]
        else:
            # Do not always choose the first of equal replicas.
            places = rng.permuted(places, axis=1)
        count = kept.shape[1]
        if count:
            places = np.concatenate([kept, places], 1)
        ready_s = self.ready(places, now)
        if count:
            at_home_s, elsewhere_s = ready_s[:, :count], ready_s[:, count:]
            at_home_s[now - self.known_s[kept] > STALE_S] = np.inf
            is_soon = at_home_s <= elsewhere_s.min(1, keepdims=True) + SPILL_S
            # The first home that is soon enough wins.
            at_home_s[is_soon & (is_soon.cumsum(1) == 1)] = 0.0
            elsewhere_s += loading_s
        return places, ready_s


def replicas_to_ask(count: int, rows: int, rng: np.random.Generator) -> Array:
    """Draw the replicas that routers ask in a period, out of `count`; a row for each router."""
    if count <= ASKED:
        return np.tile(np.arange(count), (rows, 1))
    # A replica may be drawn twice.
    return rng.integers(count, size=(rows, ASKED))


def hashed(name: str) -> int:
    """Hash a name to a number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def homes(file: int, replicas: Array) -> Array:
    """Return the indices of the replicas that keep a file, from the replicas' hashes. If a replica
    ends, only its files move (rendezvous hashing: Thaler, Ravishankar, IEEE/ACM ToN 6(1), 1998)."""
    scores = (replicas ^ np.uint64(file)) * np.uint64(0x9E3779B97F4A7C15)
    scores = (scores ^ (scores >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return scores.argsort()[::-1][:HOMES]


def replicas_needed(work: Iterable[float], queue_s: Iterable[float], target_s: float) -> float:
    """Return the number of replicas that the arriving work needs, plus those that work off the
    queue in `target_s`. Replicas report both (WORK, QUEUE_S)."""
    return sum(work) / USED_SHARE + sum(queue_s) / target_s
