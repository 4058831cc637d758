"""`sdxl serve` as a separate process, on a free loopback port."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
RAY_TRUSTS = {
    "x-request-timeout-seconds": "inf",
    "x-request-disconnect-disabled": "?1",
    "serve_multiplexed_model_id": "a",
    "serve-multiplexed-model-id": "a",
    "x-session-id": "a",
    "x-serve-router-a": "a",
    "x-request-id": "a",
}
"""headers with which a client could steer Ray Serve"""
READY = re.compile(r"ready: (http://\S+)")
START_S = 240.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


@dataclass
class Service:
    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def wait_until_ready(self) -> None:
        wait_until(
            lambda: READY.search(self.text) or self.process.poll() is not None,
            START_S,
            details=lambda: self.text,
        )
        assert READY.search(self.text), f"it ended:\n{self.text}"

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[psutil.Process]:
        return [p for p in psutil.Process(self.process.pid).children(recursive=True) if is_alive(p)]

    def named(self, title: str) -> list[psutil.Process]:
        return [p for p in self.processes() if title in " ".join(p.cmdline())]

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


COMMAND = (sys.executable, "-m", "sdxl.cli", "serve")


def end_with_tests() -> None:
    """Stop the service even if a test hangs in C."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def service(folder: Path, *flags: str, command: Sequence[str] = COMMAND) -> Iterator[Service]:
    with starting(folder, *flags, command=command) as found:
        found.wait_until_ready()
        yield found


@contextmanager
def starting(folder: Path, *flags: str, command: Sequence[str] = COMMAND) -> Iterator[Service]:
    """Yield the service before it is ready."""
    log, port = folder / "serve.log", free_port()
    argv = [*command, "--port", str(port), *flags]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SDXL_", "RAY_"))}
    # The proxy of a company, which calls within the service must not use.
    environment |= {"PYTHONPATH": str(ROOT), "https_proxy": "http://127.0.0.1:9"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            argv, cwd=folder, stdout=file, stderr=file, env=environment, preexec_fn=end_with_tests
        )
    found = Service(process, log, f"http://127.0.0.1:{port}")
    try:
        yield found
    finally:
        if process.poll() is None:
            left = found.processes()
            try:
                found.stop()
            except subprocess.TimeoutExpired:
                for each in (psutil.Process(process.pid), *left):
                    if is_alive(each):
                        each.kill()
