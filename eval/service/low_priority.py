"""An offline job through a service under interactive load: what each of them loses by the other.

python -m eval.service.low_priority [--seconds 60] [--load 0.6]

It starts `sdxl serve` on this machine, finds its rate in a closed loop, and sends Poisson arrivals
at a share of that: first alone, then beside `sdxl batch --through`. Latencies count from when a
request was due. Idle ticks are the time in which the replica's UNet has nothing to do: how much the
job takes of what the interactive load alone leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from eval.measuring.timing import quantile
from eval.service.load import GENERATE, PROMPT
from eval.service.local_service import local_service
from eval.service.scraping import values_of
from eval.service.traffic import closed_loop, open_loop

CLOSED_LOOP = 16
FIRST_S = 60.0
"""How long the job may take to its first picture."""


@dataclass
class ServiceRun:
    seconds: float
    latencies: list[float] = field(default_factory=list)
    refused: int = 0

    def quantile(self, share: float) -> float:
        return quantile(self.latencies, share)


async def ask(http: httpx.AsyncClient, run: ServiceRun, due_s: float, seed: int) -> None:
    body = {"prompt": PROMPT, "seed": seed, "deadline_s": 100}
    answer = await http.post(GENERATE, json=body)
    if answer.status_code == 200:
        run.latencies.append(time.perf_counter() - due_s)
    else:
        run.refused += 1


async def closed(url: str, seconds: float) -> float:
    """Pictures a second when the next is asked for as soon as one comes."""
    run, began_s = ServiceRun(seconds), time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await closed_loop(lambda n, due_s: ask(http, run, due_s, n), CLOSED_LOOP, seconds)
    return len(run.latencies) / (time.perf_counter() - began_s)


async def poisson(url: str, rate: float, seconds: float) -> ServiceRun:
    run = ServiceRun(seconds)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        await open_loop(lambda n, due_s: ask(http, run, due_s, n), rate, seconds, seed=7)
    return run


def busy_while(url: str, rate: float, seconds: float) -> tuple[ServiceRun, float]:
    """Also the share of the time in which the UNet computed."""
    began_s, before_s = time.perf_counter(), unet_s(url)
    run = asyncio.run(poisson(url, rate, seconds))
    return run, (unet_s(url) - before_s) / (time.perf_counter() - began_s)


def unet_s(url: str) -> float:
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(values_of(page, "sdxl_tick_seconds_sum"))


@contextmanager
def batch_through(url: str, folder: Path) -> Iterator[Path]:
    """A job that does not end by itself; its ledger is told."""
    source, out = folder / "prompts.txt", folder / "out"
    source.write_text("".join(f"{PROMPT}, number {i}\n" for i in range(20_000)))
    command = [sys.executable, "-m", "sdxl.cli", "batch", str(source), "--out", str(out), "--quiet"]
    job = subprocess.Popen([*command, "--through", url], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + FIRST_S
        while not pictures(out) and time.monotonic() < until:
            time.sleep(0.2)
        yield out
    finally:
        job.send_signal(signal.SIGINT)
        job.wait()


def pictures(out: Path) -> int:
    return sum(1 for _ in out.glob("images/*/*.png"))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=0.6, help="share of the closed loop's rate")
    options = parser.parse_args(argv)
    with local_service(["--llm", "none"]) as url, tempfile.TemporaryDirectory() as folder:
        most = asyncio.run(closed(url, options.seconds / 2))
        rate = options.load * most
        alone, alone_busy = busy_while(url, rate, options.seconds)
        with batch_through(url, Path(folder)) as out:
            before = pictures(out)
            beside, beside_busy = busy_while(url, rate, options.seconds)
            made = pictures(out) - before
    told = {
        "closed_loop_images_per_s": round(most, 3),
        "interactive": len(beside.latencies),
        "p50_s": [round(run.quantile(0.5), 3) for run in (alone, beside)],
        "p99_s": [round(run.quantile(0.99), 3) for run in (alone, beside)],
        "p99_worse": round(beside.quantile(0.99) / alone.quantile(0.99) - 1, 3),
        "refused": [alone.refused, beside.refused],
        "job_images": made,
        "busy_share": [round(alone_busy, 3), round(beside_busy, 3)],
        "idle_ticks_used": round((beside_busy - alone_busy) / (1 - alone_busy), 3),
    }
    print(json.dumps(told, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
