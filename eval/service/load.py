"""The service under load, over HTTP: the overhead of HTTP and Ray, throughput, latency, overload.

sdxl bench load [--url http://127.0.0.1:8000] [--seconds 30]

Without a URL, `sdxl serve` is started here. Arrivals are Poisson; a load is a share of the closed
loop's rate. Latencies count from the arrival. `late` counts pictures after their deadline of 20 s;
`MiB` is the replicas' memory after the run.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import httpx
import psutil

from eval.measuring.timing import quantile
from eval.service.client import local_service, unlimited_client
from eval.service.traffic import closed_loop, open_loop
from sdxl.arguments import Parser, add_option
from sdxl.params import InvalidParams

PROMPT = "a small yellow star above a green square on a white background"
SHARES = (0.5, 0.8, 0.9, 0.95, 1.5)
OVERHEAD_REQUESTS = 30
DEADLINE_S = 20.0
CLOSED_LOOP = 24
WARM_S = 5.0
TIMEOUT_S = 120.0


@dataclass
class LoadAnswers:
    """The answers of one run."""

    began_s: float = field(default_factory=time.perf_counter)
    last_s: float = 0.0
    """time of the last answer"""
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    """of pictures"""
    late: int = 0
    """pictures after their deadline"""
    added: list[float] = field(default_factory=list)
    """of pictures: latency minus the replica's own time"""

    @property
    def rate(self) -> float:
        if not self.statuses[200]:
            statuses = dict(self.statuses)
            raise SystemExit(f"load: no picture was returned; answers by status: {statuses}")
        return self.statuses[200] / (self.last_s - self.began_s)

    def row(self, name: str, offered: float) -> str:
        p50, p99 = quantile(self.latencies, 0.5), quantile(self.latencies, 0.99)
        mean = statistics.fmean(self.latencies) if self.latencies else float("nan")
        statuses = " ".join(f"{status}:{n}" for status, n in sorted(self.statuses.items()))
        return (
            f"{name:<12}{offered:>9.2f}{self.rate:>9.2f}{self.rate / offered:>8.1%}"
            f"{mean:>9.3f}{p50:>9.3f}{p99:>9.3f}{self.late:>6}{memory_mib():>7.0f}  {statuses}"
        )


def memory_mib() -> float:
    """MiB of the replicas that this process started."""
    children = psutil.Process().children(recursive=True)
    replicas = (each for each in children if "ImageReplica" in " ".join(each.cmdline()))
    return sum(each.memory_info().rss for each in replicas) / 2**20


async def send_prompt(
    http: httpx.AsyncClient, answers: LoadAnswers, seed: int, due_s: float
) -> None:
    body = {"prompt": PROMPT, "seed": seed, "deadline_s": DEADLINE_S}
    try:
        answer = await http.post("/v1/images/generations", json=body)
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


async def run_closed(http: httpx.AsyncClient, seconds: float) -> LoadAnswers:
    """Measure the service's capacity with a constant number of requests under way."""
    answers = LoadAnswers()
    await closed_loop(partial(send_prompt, http, answers), CLOSED_LOOP, seconds)
    return answers


async def measure(url: str, seconds: float, shares: Sequence[float]) -> None:
    async with unlimited_client(url, TIMEOUT_S) as http:
        await run_closed(http, WARM_S)
        alone = LoadAnswers()
        for seed in range(OVERHEAD_REQUESTS):
            await send_prompt(http, alone, seed, time.perf_counter())
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
            answers = LoadAnswers()
            send = partial(send_prompt, http, answers)
            sent = await open_loop(send, share * full.rate, seconds)
            print(answers.row(f"{share:.0%}", len(sent) / seconds), flush=True)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="sdxl bench load", description=__doc__)
    add = partial(add_option, parser)
    add("--url", None, "of a running service; without it, one is started here")
    add("--seconds", 30.0, "duration of each run")
    add("--shares", SHARES, "loads, as shares of the capacity")
    options, flags = parser.parse_known_args(argv)
    if options.url and flags:
        needed = "cannot be used with --url: they are for the `sdxl serve` that this command starts"
        raise InvalidParams("flags", " ".join(flags), needed)
    with nullcontext(options.url) if options.url else local_service(flags) as url:
        asyncio.run(measure(url, options.seconds, options.shares))
    return 0
