"""A client of the service: the API key, HTTP clients, metrics, and a service started here."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx

KEY_VARIABLE = "OPENAI_API_KEY"
"""the variable from which OpenAI's client reads its key"""
READY = re.compile(r"ready: (http://\S+)")
JOULES = "sdxl_gpu_energy_joules_total"
TIMEOUT_S = 30.0
PICTURE_S = 600.0
"""the timeout of one picture, including its refusals"""


def auth_headers(key: str = "") -> dict[str, str]:
    key = key or os.environ.get(KEY_VARIABLE, "")
    return {"authorization": f"Bearer {key}"} if key else {}


def http_client(url: str, connections: int | None = None) -> httpx.Client:
    """A client with the timeout of pictures and at most `connections` connections."""
    limits = httpx.Limits(max_connections=connections)
    return httpx.Client(base_url=url, timeout=PICTURE_S, limits=limits, headers=auth_headers())


def unlimited_client(url: str, timeout_s: float, key: str = "") -> httpx.AsyncClient:
    """A client without a limit on concurrent requests."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    headers = auth_headers(key)
    return httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits, headers=headers)


def metrics_page(url: str, key: str = "") -> str:
    return httpx.get(f"{url}/metrics", headers=auth_headers(key), timeout=TIMEOUT_S).text


def metric_values(page: str, *names: str) -> list[float]:
    """The value of every series whose name and labels begin with one of `names`."""
    return [float(line.split()[-1]) for line in page.splitlines() if line.startswith(names)]


def energy_meter(
    url: str, work: Literal["images", "llm"], key: str = ""
) -> Callable[[], float] | None:
    """Return a function that reads the joules of the GPUs that do this work, since their driver
    started; None if no GPU counts joules."""

    def read() -> list[float]:
        lines = [line for line in metrics_page(url, key).splitlines() if f'work="{work}"' in line]
        return metric_values("\n".join(lines), JOULES)

    return (lambda: sum(read())) if read() else None


@contextmanager
def local_service(flags: Sequence[str] = (), log_file: Path | None = None) -> Iterator[str]:
    """Run `sdxl serve` in a process, with its log in `log_file`. Yield its URL when it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sdxl.cli", "serve", "--port", str(port), *flags]
    with log_file.open("w+") if log_file else tempfile.NamedTemporaryFile("w+") as log:
        # The log is a file: a pipe that is no longer read would block the service.
        process = subprocess.Popen(command, stderr=log)
        try:
            yield _wait_until_ready(process, Path(log.name))
        finally:
            # Not SIGINT: a shell's background processes ignore it.
            process.terminate()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        if ready := READY.search(log.read_text(errors="replace")):
            return ready[1]
        time.sleep(0.1)
    raise RuntimeError(f"sdxl serve ended before it was ready: {log.read_text()[-2000:]}")
