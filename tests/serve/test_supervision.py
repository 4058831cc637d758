"""The process above the service ends in time and leaves no process, whatever happens below it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.serve.services import ROOT, is_alive
from tests.waiting import wait_until

SHUTDOWN_S, PATIENT_S = 0.5, 280.0
PROGRAM = """
import os, signal, subprocess, sys, time
from serve.supervision import supervise

def service():
    subprocess.Popen(["bash", "-c", "setsid sleep 300 & setsid sleep 301"])
    BODY
    time.sleep(300)
    return 0

sys.exit(supervise(service, SECONDS, lambda text: print(text, flush=True)))
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
RAY_S_HANDLER = "signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))"
MOST_S = 60.0
"""for a busy machine; alone the test takes 7 s"""


@contextmanager
def supervised(
    folder: Path, body: str, shutdown_s: float = SHUTDOWN_S
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("BODY", body).replace("SECONDS", str(shutdown_s)))
    argv = [sys.executable, str(program)]
    process = subprocess.Popen(argv, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, text=True)
    children = partial(psutil.Process(process.pid).children, recursive=True)
    wait_until(lambda: sum(p.name() == "sleep" for p in children()) == 2)
    below = children()
    try:
        yield process, below
    finally:
        process.kill()
        process.wait()
        for each in filter(is_alive, below):
            each.kill()


@pytest.mark.parametrize(
    ("body", "code"),
    [("return 0", 0), ("return 3", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 1)],
)
def test_it_ends_with_the_service_s_code(tmp_path: Path, body: str, code: int) -> None:
    with supervised(tmp_path, f"time.sleep(1); {body}") as (process, below):
        assert process.wait(MOST_S) == code
        assert not any(map(is_alive, below)), below


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "body", "code"),
    [
        (signal.SIGINT, "pass", 0),
        (signal.SIGTERM, "pass", 0),
        (signal.SIGTERM, RAY_S_HANDLER, 0),
        (signal.SIGTERM, DEAF, 1),
        (signal.SIGTERM, STOPPED, 1),
    ],
)
def test_a_signal_always_ends_it_in_time(tmp_path: Path, number: int, body: str, code: int) -> None:
    """The service below gets SIGTERM after either signal."""
    with supervised(tmp_path, body) as (process, below):
        process.send_signal(number)
        assert process.wait(MOST_S) == code
        assert not any(map(is_alive, below)), below


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    with supervised(tmp_path, DEAF, PATIENT_S) as (process, below):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None, "a second SIGTERM is no hurry"
        process.send_signal(signal.SIGINT)
        assert process.wait(MOST_S) == 1
        assert not any(map(is_alive, below)), below


def test_the_service_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    with supervised(tmp_path, "pass") as (process, below):
        service = next(p for p in below if p.ppid() == process.pid)
        process.kill()
        service.wait(MOST_S)
