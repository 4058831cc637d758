"""kill -9 under load: requests outside the killed process are answered."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.loads import PICTURE, PROMPT, Load, is_whole, stop
from tests.serve.servers import GENERATE, measured
from tests.serve.services import Service, service
from tests.serve.test_api import events_of
from tests.waiting import wait_until

CLIENTS, SECONDS, KILL_AFTER_S = 4, 15.0, 3.0
LEAVING_AT_ONCE = 50
MIB = 1 << 20
REQUESTS, RATE, STRIKE_PERIOD_S = 1000, 2.5, 10.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path, "--replicas", "2", "--ingresses", "2", "--llm", "none") as found:
        yield found


async def ask_until(load: Load, until_s: float) -> None:
    """Each request has its own connection, like requests of different clients."""
    while time.monotonic() < until_s:
        await load.run(1)


@pytest.mark.parametrize(
    ("title", "errors"),
    [
        ("ImageReplica", set()),
        ("ImageIngress", set()),
        ("ServeController", set()),
        # Without a proxy no client can connect, and requests inside it lose their connection.
        ("ProxyActor", {"ConnectError", "RemoteProtocolError", "ReadError"}),
    ],
)
def test_only_requests_inside_a_killed_proxy_fail(
    running: Service, title: str, errors: set[str]
) -> None:
    load, killed_s = Load(running.url, rate=10.0, body={**PICTURE, "steps": 8}), 0.0

    async def scenario() -> None:
        nonlocal killed_s
        until_s = time.monotonic() + SECONDS
        clients = [asyncio.create_task(ask_until(load, until_s)) for _ in range(CLIENTS)]
        await asyncio.sleep(KILL_AFTER_S)
        running.named(title)[0].kill()
        killed_s = time.monotonic()
        await asyncio.gather(*clients)

    asyncio.run(scenario())
    assert set(load.statuses) <= {"200", *errors}, load.statuses
    times = [killed_s, *(at_s for at_s in sorted(load.answered_s) if at_s > killed_s)]
    outage_s = max(b - a for a, b in itertools.pairwise(times))
    assert outage_s <= 5, f"{outage_s:.1f} s without a picture, allowed 5"


def test_a_thousand_requests_outlast_random_strikes(running: Service) -> None:
    """Every ten seconds a replica, a front end or the controller is killed or stopped, but only
    after the last one was replaced, so that one of two is left."""
    load, strikes = Load(running.url, RATE), list[dict[str, object]]()
    chance = random.Random(11)

    async def strike_on(asking: asyncio.Task[None]) -> None:
        while not asking.done():
            await asyncio.sleep(STRIKE_PERIOD_S)
            while not asking.done() and not await asyncio.to_thread(is_whole, running):
                await asyncio.sleep(0.5)
            title = chance.choice(("ImageReplica", "ImageIngress", "ServeController"))
            victims = running.named(title)
            if victims and not asking.done():
                is_stop = chance.random() < 0.5
                (stop if is_stop else psutil.Process.kill)(chance.choice(victims))
                at_s = time.monotonic()
                strikes.append({"at_s": at_s, "what": title, "how": "stop" if is_stop else "kill"})

    async def scenario() -> None:
        asking = asyncio.create_task(load.run(REQUESTS))
        await strike_on(asking)
        await asking

    began_s = time.monotonic()
    asyncio.run(scenario())
    waits_s = sorted(load.waits_s)
    report = {
        "requests": REQUESTS,
        "statuses": load.statuses,
        "longest_gap_s": round(load.longest_gap_s, 2),
        "wait_s": {"p50": waits_s[len(waits_s) // 2], "p99": waits_s[-len(waits_s) // 100]},
        "took_s": round(time.monotonic() - began_s, 1),
        "strikes": [{**each, "at_s": round(each["at_s"] - began_s, 1)} for each in strikes],  # type: ignore[operator]
    }
    text = json.dumps(report, indent=2)
    Path(os.environ.get("CHAOS_REPORT", running.log.parent / "chaos.json")).write_text(text)
    print(text)
    assert set(load.statuses) == {"200"}, load.statuses
    assert load.longest_gap_s <= 5, f"{load.longest_gap_s:.1f} s without a picture, allowed 5"


async def ask_and_leave(url: str, number: int) -> None:
    body = {"prompt": PROMPT, "seed": number, "steps": 100, "deadline_s": 100}
    async with httpx.AsyncClient(timeout=100) as http:
        asked = http.post(f"{url}{GENERATE}", json=body)
        with suppress(TimeoutError):
            await asyncio.wait_for(asked, 0.05 + 0.01 * (number % 40))


async def ask_and_leave_all(url: str, count: int) -> None:
    for first in range(0, count, LEAVING_AT_ONCE):
        wave = range(first, first + LEAVING_AT_ONCE)
        await asyncio.gather(*(ask_and_leave(url, number) for number in wave))


def wait_until_idle(url: str) -> None:
    names = ("sdxl_images_running", "sdxl_images_queued")
    with httpx.Client(base_url=url, timeout=30) as http:
        wait_until(lambda: not any(measured(http, name) for name in names), 60, 0.2)


def held_mib(found: Service) -> float:
    """Return the private memory: shared pages of Ray's object store count in every process."""
    ours = [*found.named("ImageReplica"), *found.named("ImageIngress"), *found.named("ProxyActor")]
    held = [process.memory_info() for process in ours]
    return sum(each.rss - each.shared for each in held) / MIB


def test_five_hundred_cancelled_requests_keep_no_slot_and_no_memory(running: Service) -> None:
    body = {"prompt": PROMPT, "seed": 1, "steps": 8, "deadline_s": 100}
    asked = f"{running.url}{GENERATE}"
    before = httpx.post(asked, json=body, timeout=100).json()["data"][0]["b64_json"]
    asyncio.run(ask_and_leave_all(running.url, 200))
    wait_until_idle(running.url)
    had = held_mib(running)
    asyncio.run(ask_and_leave_all(running.url, 500))
    wait_until_idle(running.url)
    grown = held_mib(running) - had
    print(f"{had:.0f} MiB before 500 left, {grown:+.0f} MiB after")
    assert grown <= 0.1 * had, f"{grown:.0f} MiB more than {had:.0f}, allowed a tenth"
    after = httpx.post(asked, json=body, timeout=100).json()["data"][0]["b64_json"]
    assert after == before


def busiest(processes: list[psutil.Process]) -> psutil.Process:
    """Measure all processes at once, because a picture takes half a second."""
    for process in processes:
        process.cpu_percent()
    time.sleep(0.1)
    return max(processes, key=lambda process: process.cpu_percent())


def test_a_stream_goes_on_with_the_same_picture_when_its_replica_dies(running: Service) -> None:
    body = {"prompt": PROMPT, "seed": 5, "steps": 100, "deadline_s": 100}
    streamed = {**body, "stream": True, "partial_images": 3, "progress": True}
    expected = httpx.post(f"{running.url}{GENERATE}", json=body, timeout=100).json()["data"][0]
    text, is_killed = "", False
    with httpx.stream("POST", f"{running.url}{GENERATE}", json=streamed, timeout=100) as answer:
        for part in answer.iter_text():
            text += part
            if not is_killed and '"step": 5,' in text:
                busiest(running.named("ImageReplica")).kill()
                is_killed = True
    last = events_of(text)[-1]
    assert is_killed and last["type"] == "image_generation.completed"
    assert last["b64_json"] == expected["b64_json"]
    assert "attempt 1 of" in running.text, "another replica was killed than the one at work"
