"""Processes that hang and do not die: whoever could be answered by a healthy one is, and soon."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.servers import GENERATE
from tests.serve.services import Service, is_alive, service

PROMPT = "a red circle on a blue background"
RATE, SECONDS, STRIKE_S = 2.0, 24.0, 4.0
GAP_S = 5.0
REPLACED_S = 60.0
"""On a busy machine, too: a replica's start is most of it."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path, "--replicas", "2", "--ingresses", "2", "--llm", "none") as found:
        yield found


@dataclass
class Load:
    """Requests at a fixed rate, whatever becomes of the earlier ones."""

    url: str
    statuses: Counter[str] = field(default_factory=Counter)
    answered_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        async with httpx.AsyncClient(
            timeout=100, limits=httpx.Limits(max_connections=None)
        ) as http:
            asked = []
            for seed in range(int(seconds * RATE)):
                asked.append(asyncio.create_task(self._ask(http, seed)))
                await asyncio.sleep(1 / RATE)
            await asyncio.gather(*asked)

    async def _ask(self, http: httpx.AsyncClient, seed: int) -> None:
        body = {"prompt": PROMPT, "seed": seed, "steps": 4, "deadline_s": 60}
        began_s = time.monotonic()
        try:
            answer = await http.post(f"{self.url}{GENERATE}", json=body)
            status = str(answer.status_code)
        except httpx.HTTPError as error:
            status = type(error).__name__
        self.statuses[status] += 1
        if status == "200":
            self.answered_s.append(time.monotonic())
            self.waits_s.append(self.answered_s[-1] - began_s)

    @property
    def longest_gap_s(self) -> float:
        times = sorted(self.answered_s)
        return max(b - a for a, b in itertools.pairwise(times))


def stop(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)


def struck(found: Service, victim: psutil.Process) -> Load:
    load = Load(found.url)

    async def scenario() -> None:
        asking = asyncio.create_task(load.run(SECONDS))
        await asyncio.sleep(STRIKE_S)
        stop(victim)
        await asking

    asyncio.run(scenario())
    print(
        f"{load.statuses}, longest gap {load.longest_gap_s:.1f} s, wait {max(load.waits_s):.1f} s"
    )
    return load


def wait_until_replaced(found: Service, title: str, victim: psutil.Process, count: int) -> None:
    until = time.monotonic() + REPLACED_S
    while is_alive(victim) or len(found.named(title)) < count:
        assert time.monotonic() < until, f"{found.named(title)} after {REPLACED_S} s"
        time.sleep(0.2)


def test_a_stopped_replica_costs_no_request_and_is_replaced(running: Service) -> None:
    victim = running.named("ImageReplica")[0]
    load = struck(running, victim)
    assert set(load.statuses) == {"200"}, load.statuses
    assert load.longest_gap_s <= GAP_S, f"{load.longest_gap_s:.1f} s without a picture"
    wait_until_replaced(running, "ImageReplica", victim, 2)
