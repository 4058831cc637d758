"""Several devices as one: which of them gets an image, and how many are needed.

Pure decisions over the load that replicas report. serve/fleet acts on them, and the simulation of
`sdxl bench fleet` runs the same functions. It knows no clock.
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
"""How often a router asks replicas for their load, and how many at most, chosen at random: what it
knows and what it asks does not grow with the fleet."""
STALE_S = 1.0
"""The load of a replica's last answer counts for this long."""
CHOICES = 6
"""Replicas that a router compares for an image. It knows old loads, and so do others: all would
send to the one that looks best (Mitzenmacher, "How Useful Is Old Information?", TPDS 2000)."""
HOMES, SPILL_S = 32, 0.2
"""Of the replicas that keep a file of requests, in order, the first gets an image that is not ready
later there, by so much, than elsewhere: a popular file is kept by more of them."""
USED_SHARE = 0.8
"""of a replica's time; beyond it queues grow fast, so another replica is needed"""
WORK, QUEUE_S = "work", "queue_s"
"""Reported for scaling: seconds of the device that arrived each second, and those that wait."""

Array = Any
"""of numpy, with any shape"""


@dataclass(frozen=True)
class Outlook:
    """What a replica reports to routers, for a standard image."""

    ready_in_s: float
    """until one more would be ready"""
    alone_s: float
    """duration on an idle device"""
    each_s: float
    """seconds of the device for each further one"""

    @classmethod
    def of(cls, admission: Admission, standard: Flight) -> Outlook:
        limits, costs = admission.limits, admission.costs
        alone_s = project([standard], limits, costs, 0.0)[standard.id]
        ready_s = admission.ready_s(standard) - admission.now
        return cls(ready_s, alone_s, costs.work_s(standard, limits))


class Loads:
    """The latest reports, and the images sent since, as arrays. A place is a replica's index;
    `places` below have any shape."""

    def __init__(self, count: int) -> None:
        # Nothing is known of a new replica, so only what was sent counts.
        self.known_s, self.ready_in_s, self.alone_s = np.zeros((3, count))
        self.each_s, self.sent = np.ones(count), np.zeros(count)

    def copy(self, place: int, other: Loads, its_place: int) -> None:
        for name, values in vars(self).items():
            values[place] = vars(other)[name][its_place]

    def report(self, places: Array, now: Array, outlooks: Array, included: Array) -> None:
        """`outlooks`: the fields of Outlook, each of the shape of `places`; `included`: how many of
        the images sent they include."""
        self.known_s[places] = now
        self.ready_in_s[places], self.alone_s[places], self.each_s[places] = outlooks
        self.sent[places] -= included

    def ready(self, places: Array, now: float) -> Array:
        """Seconds until one more image would be ready."""
        left_s = self.ready_in_s[places] - (now - self.known_s[places])
        return np.maximum(left_s, self.alone_s[places]) + self.sent[places] * self.each_s[places]

    def candidates(
        self, places: Array, now: float, kept: Array, loading_s: Array, rng: np.random.Generator
    ) -> tuple[Array, Array]:
        """The replicas to compare for each image, and when it would be ready there; a row an image.
        `places`: those that answered; `kept`: those that keep the image's file, which others load
        in `loading_s`."""
        rows, count = places.shape
        if count > CHOICES:
            drawn = rng.integers(count, size=(rows, CHOICES))
            places = places[np.arange(rows)[:, None], drawn]
        else:
            # Of equal ones, not always the first.
            places = rng.permuted(places, axis=1)
        count = kept.shape[1]
        if count:
            places = np.concatenate([kept, places], 1)
        ready_s = self.ready(places, now)
        if count:
            at_home_s, elsewhere_s = ready_s[:, :count], ready_s[:, count:]
            at_home_s[now - self.known_s[kept] > STALE_S] = np.inf
            is_soon = at_home_s <= elsewhere_s.min(1, keepdims=True) + SPILL_S
            # Nothing is sooner than the first of those that are soon enough.
            at_home_s[is_soon & (is_soon.cumsum(1) == 1)] = 0.0
            elsewhere_s += loading_s
        return places, ready_s


def asked(count: int, rows: int, rng: np.random.Generator) -> Array:
    """Of `count` replicas, those that a router asks in a period; a row a router."""
    if count <= ASKED:
        return np.tile(np.arange(count), (rows, 1))
    # One that is drawn twice is asked once.
    return rng.integers(count, size=(rows, ASKED))


def hashed(name: str) -> int:
    """A number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


def homes(file: int, replicas: Array) -> Array:
    """The places of the replicas that keep a file, by their hashes: if a replica goes, only its
    files move (rendezvous hashing: Thaler, Ravishankar, IEEE/ACM ToN 6(1), 1998)."""
    scores = (replicas ^ np.uint64(file)) * np.uint64(0x9E3779B97F4A7C15)
    scores = (scores ^ (scores >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return scores.argsort()[::-1][:HOMES]


def replicas_needed(work: Iterable[float], queue_s: Iterable[float], target_s: float) -> float:
    """As many as the arriving work needs, and as many more as work off the queue in `target_s`.
    Each replica reports both (WORK, QUEUE_S)."""
    return sum(work) / USED_SHARE + sum(queue_s) / target_s
