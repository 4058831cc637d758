"""Processes that hang and do not die: whoever could be answered by a healthy one is, and soon."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.loads import Load, is_whole, stop
from tests.serve.servers import GENERATE
from tests.serve.services import ROOT, Service, is_alive, service
from tests.tools import tool

PROMPT = "a red circle on a blue background"
RATE, SECONDS, STRIKE_S = 2.0, 24.0, 4.0
GAP_S = 5.0
REPLACED_S = 60.0
"""On a busy machine, too: a replica's start is most of it."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


FLAGS = ("--replicas", "2", "--ingresses", "2", "--llm", "none")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("hung")
    command = (sys.executable, "-m", "tests.serve.hung_service", str(folder))
    with service(folder, *FLAGS, command=command) as found:
        yield found


@pytest.fixture
def running(shared: Service) -> Service:
    """The one service, whole again after what was done to it before."""
    until = time.monotonic() + REPLACED_S
    while not is_whole(shared):
        assert time.monotonic() < until, "it does not become whole again"
        time.sleep(0.5)
    return shared


def struck(found: Service, strike: Callable[[], object]) -> Load:
    load = Load(found.url, RATE)

    async def scenario() -> None:
        asking = asyncio.create_task(load.run(int(SECONDS * RATE)))
        await asyncio.sleep(STRIKE_S)
        strike()
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
    check_strike(running, "ImageReplica", stop)


def test_a_stopped_front_costs_no_request_and_is_replaced(running: Service) -> None:
    check_strike(running, "ImageIngress", stop)


def test_a_killed_front_costs_no_request(running: Service) -> None:
    check_strike(running, "ImageIngress", psutil.Process.kill)


def test_a_stopped_controller_costs_no_request_and_is_replaced(running: Service) -> None:
    check_strike(running, "ServeController", stop, 1)


def test_a_stopped_proxy_is_replaced(running: Service) -> None:
    """There is no second one: who is inside loses the connection."""
    (victim,) = running.named("ProxyActor")
    stop(victim)
    wait_until_replaced(running, "ProxyActor", victim, 1)
    began_s = time.monotonic()
    while not is_answered(running.url):
        assert time.monotonic() - began_s < REPLACED_S, "the new proxy does not answer"


@pytest.mark.parametrize("what", ["engine", "loop"])
def test_a_replica_whose_engine_or_event_loop_hangs_costs_no_request(
    running: Service, what: str
) -> None:
    folder = running.log.parent
    load = Load(running.url, RATE)

    async def scenario() -> None:
        asking = asyncio.create_task(load.run(int(SECONDS * RATE)))
        await asyncio.sleep(STRIKE_S)
        (folder / what).touch()
        await asking

    asyncio.run(scenario())
    check(load)
    pid = int((folder / f"{what}.pid").read_text())
    until = time.monotonic() + REPLACED_S
    while psutil.pid_exists(pid):
        assert time.monotonic() < until, f"the replica that hung is there after {REPLACED_S} s"
        time.sleep(0.2)


def test_a_connection_that_swallows_everything_costs_no_request(tmp_path: Path) -> None:
    """The service in a network of its own, where packets to and from one replica are dropped."""
    if os.geteuid():
        pytest.skip("only root may make a network of its own")
    command = [tool("unshare", "util-linux"), "--net", sys.executable]
    done = subprocess.run(
        [*command, "-m", "tests.serve.blackhole", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(done.stdout[-1000:])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def check_strike(
    found: Service, title: str, strike: Callable[[psutil.Process], None], count: int = 2
) -> None:
    victim = found.named(title)[0]
    check(struck(found, lambda: strike(victim)))
    wait_until_replaced(found, title, victim, count)


def check(load: Load) -> None:
    assert set(load.statuses) == {"200"}, load.statuses
    gap_s = load.longest_gap_s
    assert gap_s <= GAP_S, f"{gap_s:.1f} s without a picture, allowed {GAP_S}"


def is_answered(url: str) -> bool:
    body = {"prompt": PROMPT, "steps": 2, "deadline_s": 60}
    try:
        return httpx.post(f"{url}{GENERATE}", json=body, timeout=60).status_code == 200
    except httpx.HTTPError:
        return False
