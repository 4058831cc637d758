"""Requests at a fixed rate to a running service, and their outcomes during a failure."""

from __future__ import annotations

import asyncio
import itertools
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.serve.servers import GENERATE
from tests.serve.services import Service

PROMPT = "a red circle on a blue background"
PICTURE: dict[str, Any] = {"prompt": PROMPT, "steps": 4, "cache_interval": 2, "deadline_s": 300}
QUICK = {"prompt": PROMPT, "steps": 2, "deadline_s": 60}


@dataclass
class Load:
    """Requests at a fixed rate, which do not wait for answers."""

    url: str
    rate: float
    """requests a second"""
    path: str = GENERATE
    body: dict[str, Any] = field(default_factory=lambda: PICTURE)
    """the body of each request, without the seed"""
    statuses: Counter[str] = field(default_factory=Counter)
    answered_s: list[float] = field(default_factory=list)
    failed_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    async def run(self, count: int) -> None:
        async with httpx.AsyncClient(
            timeout=300, limits=httpx.Limits(max_connections=None)
        ) as http:
            asked = []
            for seed in range(count):
                asked.append(asyncio.create_task(self._ask(http, seed)))
                await asyncio.sleep(1 / self.rate)
            await asyncio.gather(*asked)

    async def _ask(self, http: httpx.AsyncClient, seed: int) -> None:
        began_s = time.monotonic()
        try:
            answer = await http.post(f"{self.url}{self.path}", json={**self.body, "seed": seed})
            status = str(answer.status_code)
        except httpx.HTTPError as error:
            status = type(error).__name__
        self.statuses[status] += 1
        ended_s = time.monotonic()
        if status == "200":
            self.answered_s.append(ended_s)
            self.waits_s.append(ended_s - began_s)
        else:
            self.failed_s.append(ended_s)

    @property
    def longest_gap_s(self) -> float:
        times = sorted(self.answered_s)
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def stop(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)


def is_answered(url: str, path: str = GENERATE, body: Any = QUICK) -> bool:
    try:
        return httpx.post(f"{url}{path}", json=body, timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def reported(url: str, kind: str) -> set[str]:
    """Return the names of the replicas, or of the front ends (`ingress`), that report now."""
    try:
        page = httpx.get(f"{url}/metrics", timeout=10).text
    except httpx.HTTPError:
        return set()
    return set(re.findall(rf'{kind}="(\w+)"', page))


def is_whole(found: Service) -> bool:
    """Return whether two replicas and two front ends report."""
    return all(len(reported(found.url, kind)) == 2 for kind in ("replica", "ingress"))
