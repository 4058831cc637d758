"""Processes that hang: every request that a healthy process can answer is answered soon. Killed
processes are in test_chaos.py, lost networks in test_several_hosts.py."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.serve.loads import Load, is_answered, is_whole, stop
from tests.serve.services import Service, is_alive, service
from tests.waiting import wait_until

RATE, SECONDS, STRIKE_S = 2.0, 24.0, 4.0
GAP_S = 5.0
REPLACED_S = 60.0
"""long enough for a busy machine; most of it is a replica's start"""

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
    """The shared service, after its recovery from the test before."""
    wait_until(lambda: is_whole(shared), REPLACED_S, 0.5)
    return shared


def load_with(found: Service, strike: Callable[[], object]) -> Load:
    """Load the service, and call `strike` in the middle."""
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
    wait_until(lambda: not is_alive(victim), REPLACED_S, 0.2)
    wait_until(lambda: len(found.named(title)) >= count, REPLACED_S, 0.2, lambda: found.text)


@pytest.mark.parametrize(
    ("title", "count"), [("ImageReplica", 2), ("ImageIngress", 2), ("ServeController", 1)]
)
def test_a_stopped_process_costs_no_request_and_is_replaced(
    running: Service, title: str, count: int
) -> None:
    victim = running.named(title)[0]
    check(load_with(running, lambda: stop(victim)))
    wait_until_replaced(running, title, victim, count)


def test_a_stopped_proxy_is_replaced(running: Service) -> None:
    """There is only one proxy, so requests inside it lose their connection."""
    (victim,) = running.named("ProxyActor")
    stop(victim)
    wait_until_replaced(running, "ProxyActor", victim, 1)
    wait_until(lambda: is_answered(running.url), REPLACED_S)


@pytest.mark.parametrize("what", ["engine", "loop"])
def test_a_replica_whose_engine_or_event_loop_hangs_costs_no_request(
    running: Service, what: str
) -> None:
    folder = running.log.parent
    check(load_with(running, (folder / what).touch))
    pid = int((folder / f"{what}.pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid), REPLACED_S)


def check(load: Load) -> None:
    assert set(load.statuses) == {"200"}, load.statuses
    gap_s = load.longest_gap_s
    assert gap_s <= GAP_S, f"{gap_s:.1f} s without a picture, allowed {GAP_S}"
