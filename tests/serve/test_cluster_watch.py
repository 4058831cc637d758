"""A controller that hangs is replaced; a controller that is still starting is not."""

from __future__ import annotations

import os
import signal

import pytest

from serve import cluster
from serve.cluster import PINGS, STARTING_PINGS, ClusterWatch

OLD, NEW = 41, 42


class Watched:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = [OLD]
        self.killed: list[int] = []
        self.watch = ClusterWatch(lambda text: None)
        monkeypatch.setattr(cluster, "controllers", lambda: list(self.running))
        monkeypatch.setattr(cluster, "is_running", lambda pid: pid in self.running)
        monkeypatch.setattr(os, "kill", self._kill)

    def _kill(self, pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        self.running.remove(pid)
        self.killed.append(pid)

    def killed_after(self, *answers: bool | None) -> list[int]:
        for answer in answers:
            self.watch._check_controller(answer)
        return self.killed


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_controller_that_stops_answering_is_replaced(watched: Watched) -> None:
    assert watched.killed_after(True, *[False] * PINGS) == [OLD]


def test_a_controller_that_answers_in_between_is_kept(watched: Watched) -> None:
    assert watched.killed_after(True, *[False] * (PINGS - 1), True, *[False] * (PINGS - 1)) == []


def test_a_starting_controller_has_time(watched: Watched) -> None:
    assert watched.killed_after(None, *[False] * (STARTING_PINGS - 1)) == []
    assert watched.killed_after(False) == [OLD]


def test_the_next_controller_has_time_to_start(watched: Watched) -> None:
    watched.killed_after(True, *[False] * PINGS)
    watched.running.append(NEW)
    assert watched.killed_after(*[False] * (STARTING_PINGS - 1)) == [OLD]
    assert watched.killed_after(True, *[False] * PINGS) == [OLD, NEW]
