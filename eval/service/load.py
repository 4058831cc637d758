"""The service under load, over HTTP: what HTTP and Ray add, throughput, latency, overload.

sdxl bench load [--url http://127.0.0.1:8000] [--seconds 30]

Without a URL it starts `sdxl serve` on this machine, and ends it. Arrivals are Poisson; the share
is of the rate that a closed loop reached. Latencies count from when a request was due; `late` are
pictures past the 20 s that they were accepted for, `MiB` is the replicas' memory afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import psutil

from eval.measuring.timing import quantile
from eval.service import api_key
from eval.service.local_service import local_service
from eval.service.traffic import closed_loop, open_loop
from sdxl.params import InvalidParams

GENERATE = "/v1/images/generations"
PROMPT = "a small yellow star above a green square on a white background"
SHARES = (0.5, 0.8, 0.9, 0.95, 1.5)
OVERHEAD_REQUESTS = 30
DEADLINE_S = 20.0
CLOSED_LOOP = 24
WARM_S = 5.0


@dataclass
class LoadAnswers:
    """What came back from one run."""

    began_s: float = field(default_factory=time.perf_counter)
    last_s: float = 0.0
    """when the last answer came"""
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    """of pictures"""
    late: int = 0
    """pictures that came after their deadline"""
    added: list[float] = field(default_factory=list)
    """of pictures: latency less what the replica says its work took"""

    @property
    def rate(self) -> float:
        if not self.statuses[200]:
            raise SystemExit(f"load: no picture came; answers by status: {dict(self.statuses)}")
        return self.statuses[200] / (self.last_s - self.began_s)

    def row(self, name: str, offered: float) -> str:
        p50, p99 = quantile(self.latencies, 0.5), quantile(self.latencies, 0.99)
        mean = statistics.fmean(self.latencies) if self.latencies else float("nan")
        told = " ".join(f"{status}:{n}" for status, n in sorted(self.statuses.items()))
        return (
            f"{name:<12}{offered:>9.2f}{self.rate:>9.2f}{self.rate / offered:>8.1%}"
            f"{mean:>9.3f}{p50:>9.3f}{p99:>9.3f}{self.late:>6}{memory_mib():>7.0f}  {told}"
        )


def memory_mib() -> float:
    """Of the replicas that this process started, by way of a service of its own."""
    ours = psutil.Process().children(recursive=True)
    return sum(p.memory_info().rss for p in ours if "ImageReplica" in " ".join(p.cmdline())) / 2**20


async def ask(http: httpx.AsyncClient, seed: int, answers: LoadAnswers, due_s: float) -> None:
    try:
        asked = {"prompt": PROMPT, "seed": seed, "deadline_s": DEADLINE_S}
        answer = await http.post(GENERATE, json=asked)
    except httpx.HTTPError:
        answers.statuses[0] += 1
        return
    answers.last_s = time.perf_counter()
    latency = answers.last_s - due_s
    answers.statuses[answer.status_code] += 1
    if answer.status_code == 200:
        answers.late += latency > DEADLINE_S
        answers.latencies.append(latency)
        answers.added.append(latency - answer.json()["data"][0]["timings"]["total_s"])


async def one_by_one(http: httpx.AsyncClient, count: int) -> LoadAnswers:
    answers = LoadAnswers()
    for seed in range(count):
        await ask(http, seed, answers, time.perf_counter())
    return answers


async def run_closed(http: httpx.AsyncClient, seconds: float) -> LoadAnswers:
    """Always the same number under way: how much the service can do."""
    answers = LoadAnswers()
    await closed_loop(lambda n, due_s: ask(http, n, answers, due_s), CLOSED_LOOP, seconds)
    return answers


async def run_open(
    http: httpx.AsyncClient, rate: float, seconds: float
) -> tuple[LoadAnswers, float]:
    """Requests come when they come, whatever the service does. Also the rate at which they did."""
    answers = LoadAnswers()
    asked = await open_loop(lambda n, due_s: ask(http, n, answers, due_s), rate, seconds)
    return answers, len(asked) / seconds


def connected(url: str, timeout_s: float = 120.0) -> httpx.AsyncClient:
    """As many requests under way as there are."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    headers = api_key.headers()
    return httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits, headers=headers)


async def measure(url: str, seconds: float, shares: Sequence[float]) -> None:
    async with connected(url) as http:
        await run_closed(http, WARM_S)
        alone = await one_by_one(http, OVERHEAD_REQUESTS)
        print(
            f"HTTP and Ray add {1000 * quantile(alone.added, 0.5):.1f} ms (p50) to "
            f"{1000 * quantile(alone.latencies, 0.5):.1f} ms"
        )
        full = await run_closed(http, seconds)
        print(
            f"\n{'load':<12}{'offered':>9}{'images/s':>9}{'':>8}{'mean s':>9}{'p50':>9}{'p99':>9}"
            f"{'late':>6}{'MiB':>7}"
        )
        print(full.row("closed loop", full.rate))
        for share in shares:
            answers, offered = await run_open(http, share * full.rate, seconds)
            print(answers.row(f"{share:.0%}", offered), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sdxl bench load", description=__doc__)
    parser.add_argument("--url", help="a service that runs; without one, one is started")
    parser.add_argument("--seconds", type=float, default=30.0, help="of every run (%(default)s)")
    parser.add_argument("--shares", type=json.loads, default=list(SHARES), help="of full load")
    options, flags = parser.parse_known_args(argv)
    if options.url and flags:
        needed = "needed none with --url: they are for the `sdxl serve` that is started without one"
        raise InvalidParams("flags", " ".join(flags), needed)
    if options.url:
        asyncio.run(measure(options.url, options.seconds, options.shares))
    else:
        with local_service(flags) as url:
            asyncio.run(measure(url, options.seconds, options.shares))
    return 0


if __name__ == "__main__":
    sys.exit(main())
