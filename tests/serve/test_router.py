"""The router's arithmetic: which replica finishes first, by old reports and later orders."""

from __future__ import annotations

from collections import deque

import pytest

from serve.fleet.router import ready_in_s

IDLE = {"at_s": 100.0, "ready_in_s": 2.0, "alone_s": 2.0, "each_s": 0.5}
BUSY = {**IDLE, "ready_in_s": 8.0}


def test_an_idle_replica_stays_as_quick_as_it_reported() -> None:
    assert ready_in_s(IDLE, deque(), 100) == ready_in_s(IDLE, deque(), 150) == 2


def test_a_busy_replica_is_ready_sooner_as_it_works() -> None:
    assert [ready_in_s(BUSY, deque(), now) for now in (100, 103, 200)] == [8, 5, 2]


def test_only_orders_sent_after_the_report_are_added() -> None:
    sent = deque([98.0, 100.0, 100.1, 100.2])
    assert ready_in_s(IDLE, sent, 101) == 2 + 2 * 0.5
    assert list(sent) == [100.1, 100.2]


def test_a_burst_goes_to_the_replicas_that_are_ready_first() -> None:
    sent: list[deque[float]] = [deque(), deque()]
    stats = (IDLE, {**IDLE, "ready_in_s": 4.0})
    for i in range(10):
        ready = [ready_in_s(s, q, 100) for s, q in zip(stats, sent, strict=True)]
        sent[ready.index(min(ready))].append(101 + i)
    assert [len(queue) for queue in sent] == [7, 3]


def test_an_unknown_replica_is_tried() -> None:
    assert ready_in_s({}, deque(), 100) < ready_in_s(IDLE, deque(), 100)
    assert ready_in_s({}, deque([1.0] * 5), 100) == pytest.approx(5)
