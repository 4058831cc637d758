"""A process below `sdxl serve` dies or stops: the service recovers, or ends without leftovers."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.serve.loads import is_answered
from tests.serve.services import START_S, Service, is_alive, service, starting
from tests.waiting import wait_until

SHUTDOWN_S = 5.0
ENDS_S = 15.0
"""the time within which a service that cannot recover must end"""
FLAGS = ("--llm", "none", "--shutdown-s", str(SHUTDOWN_S))

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def is_free(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def has_ended(found: Service, within_s: float) -> bool:
    try:
        found.process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def check_nothing_is_left(found: Service, below: list[psutil.Process]) -> None:
    left = [p.cmdline()[:2] for p in below if is_alive(p)]
    assert not left, f"left: {left}"
    assert is_free(found.url), "the port is still held"


def command_has(process: psutil.Process, title: str) -> bool:
    try:
        return title in " ".join(process.cmdline()[:3])
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("title", ["raylet/raylet", "gcs_server"])
def test_it_ends_when_an_irreplaceable_process_dies(tmp_path: Path, title: str) -> None:
    with service(tmp_path, *FLAGS) as found:
        below = found.processes()
        (victim,) = (p for p in below if title in (p.cmdline() or [""])[0])
        began_s = time.monotonic()
        victim.kill()
        assert has_ended(found, ENDS_S), f"it still runs {ENDS_S} s after {title} died"
        print(f"{title}: ended after {time.monotonic() - began_s:.1f} s")
        assert found.process.returncode == 1
        check_nothing_is_left(found, below)


def test_the_service_recovers_or_ends_when_any_other_process_dies(tmp_path: Path) -> None:
    """Ray's processes are killed one after another. An ended service is started again."""
    titles = ["log_monitor.py", "dashboard/agent.py", "runtime_env/agent/main.py", "monitor.py"]
    for number, title in enumerate(titles):
        folder = tmp_path / str(number)
        folder.mkdir()
        with service(folder, *FLAGS) as found:
            below = found.processes()
            victims = [p for p in below if command_has(p, title)]
            print(f"{title}: {len(victims)} of {len(below)}")
            for victim in victims:
                victim.kill()
            if has_ended(found, ENDS_S):
                assert found.process.returncode == 1, title
                check_nothing_is_left(found, below)
                print(f"{title}: it ended")
            else:
                assert is_answered(found.url), title
                print(f"{title}: it goes on")


@pytest.mark.parametrize("title", ["ImageReplica", "raylet/raylet", "ServeController"])
def test_sigterm_ends_it_in_time_despite_a_stopped_process(tmp_path: Path, title: str) -> None:
    with service(tmp_path, *FLAGS) as found:
        below = found.processes()
        found.named(title)[0].send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        found.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        found.process.send_signal(signal.SIGTERM)
        most_s = SHUTDOWN_S + 10
        assert has_ended(found, most_s + 1), f"it still runs {most_s} s after SIGTERM"
        print(f"{title} stopped: ended after {time.monotonic() - began_s:.1f} s")
        check_nothing_is_left(found, below)


@pytest.mark.parametrize("after_s", [0.3, 3.0, 8.0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_it(tmp_path: Path, after_s: float, number: int) -> None:
    with starting(tmp_path, *FLAGS) as found:
        time.sleep(after_s)
        below = found.processes()
        found.process.send_signal(number)
        assert has_ended(found, SHUTDOWN_S + 10), found.text
        assert found.process.returncode in (0, 1, 130, -number), found.text
        check_nothing_is_left(found, below)


def test_a_replica_that_dies_while_another_starts_is_replaced(tmp_path: Path) -> None:
    title = "ServeReplica:default:ImageReplica"
    with starting(tmp_path, *FLAGS, "--replicas", "2") as found:
        slow = wait_until(lambda: found.named(title)[1:2], START_S)[0]
        slow.send_signal(signal.SIGSTOP)
        # The other front end serves already.
        wait_until(lambda: is_answered(found.url), START_S)
        for each in found.named(title):
            if each.pid != slow.pid:
                each.kill()
        wait_until(lambda: "a replica died" in found.text, START_S)
        slow.send_signal(signal.SIGCONT)
        found.wait_until_ready()
        assert is_answered(found.url) and len(found.named(title)) == 2, found.text
