"""Ray Serve's two doors side by side: its own proxy, and the HAProxy that it bundles.

python -m eval.service.doors [--pairs 200]

Both services run at once and every request goes to one and then to the other, so that whatever else
the machine does slows both alike. The second one listens on all interfaces while it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager

import httpx

from eval.service.load import GENERATE
from eval.service.local_service import local_service

HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
DOORS = {"Ray's proxy": {}, "HAProxy": HAPROXY}
FLAGS = ("--llm", "none")
PICTURE = {"prompt": "a ring", "steps": 1, "deadline_s": 100}
AT_ONCE = 16


@contextmanager
def environment(given: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name)
        os.environ.update(before)


async def health(http: httpx.AsyncClient) -> float:
    return await timed(http, "GET", "/healthz")


async def picture(http: httpx.AsyncClient) -> float:
    return await timed(http, "POST", GENERATE, json=PICTURE)


async def timed(http: httpx.AsyncClient, method: str, path: str, **options: object) -> float:
    began = time.perf_counter()
    answer = await http.request(method, path, **options)  # type: ignore[arg-type]
    answer.raise_for_status()
    return time.perf_counter() - began


async def at_once(http: httpx.AsyncClient) -> float:
    """Seconds an answer, when many ask."""
    began = time.perf_counter()
    await asyncio.gather(*(health(http) for _ in range(AT_ONCE)))
    return (time.perf_counter() - began) / AT_ONCE


async def compare(urls: dict[str, str], pairs: int) -> None:
    kinds = {"/healthz": health, f"/healthz, {AT_ONCE} at once": at_once, "a picture": picture}
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120))
            for name, url in urls.items()
        }
        for kind, ask in kinds.items():
            times: dict[str, list[float]] = {name: [] for name in urls}
            for number in range(pairs):
                order = list(clients.items())
                for name, http in order if number % 2 else reversed(order):
                    times[name].append(await ask(http))
            for name, found in times.items():
                print(row(kind, name, found), flush=True)


def row(kind: str, name: str, seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    p90 = ordered[int(0.9 * len(ordered))]
    median = statistics.median(ordered)
    return f"{kind:<24}{name:<14}{1000 * median:>9.2f} ms{1000 * p90:>9.2f} ms"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.service.doors", description=__doc__)
    parser.add_argument("--pairs", type=int, default=200, help="requests to each (%(default)s)")
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        urls = {}
        for name, given in DOORS.items():
            with environment(given):
                urls[name] = stack.enter_context(local_service(FLAGS))
        print(f"{'':<24}{'':<14}{'p50':>12}{'p90':>12}")
        asyncio.run(compare(urls, options.pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
