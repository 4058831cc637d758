"""The memory that large answers and uploads take in the proxy, a front end and a replica."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve import double
from tests.serve.servers import GENERATE
from tests.serve.services import Service, service

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

MOST_GROWN = {"ProxyActor": 3.0, "ImageIngress": 5.0}
"""allowed peaks of the processes that pass on an answer, in sizes of the answer. A front end holds
the pictures, their base64, and Ray's three copies of the waiting parts: pickled, in a message, in
its buffer."""
FULL: dict[str, Any] = {"prompt": "a", "n": 10, "steps": 2, "deadline_s": 100}
ASKED: dict[str, dict[str, Any]] = {
    "JSON": FULL,
    "url": FULL | {"response_format": "url"},
    "stream": FULL | {"steps": 4, "stream": True, "partial_images": 3},
    "slow reader": FULL,
}


@pytest.mark.timeout(1200)
def test_ten_pictures_of_1024_squared_noise_pass_in_bounded_memory(tmp_path: Path) -> None:
    """This compares each process's VmHWM before and after the request."""
    folder = double.write(tmp_path / "sdxl", speed=100)
    flags = ("--model", str(folder), "--backend", double.BACKEND, "--llm", "none")
    with (
        service(tmp_path, *flags, "--results-dir", str(tmp_path / "results")) as found,
        httpx.Client(base_url=found.url, timeout=300) as http,
    ):
        assert http.post(GENERATE, json=FULL | {"n": 1}).status_code == 200
        for name, asked in ASKED.items():
            peaks = Peaks(found)
            size = received(http, asked, pause_s=0.02 if name == "slow reader" else 0.0)
            grown = peaks.grown()
            print(f"{name}: {size / 1e6:.1f} MB; peaks grew by MB: {grown}")
            for process, most in MOST_GROWN.items():
                assert grown[process] <= most * max(size, 42e6) / 1e6, f"{name}: {process} {grown}"


UPLOAD = 60_000_000
UPLOADS = 12


def test_uploads_that_are_given_up_take_bounded_memory_and_give_it_back(tmp_path: Path) -> None:
    """Four bodies of the largest size are held; proxy and front end copy each at most twice."""
    flags = ("--llm", "none", "--batches-dir", str(tmp_path / "batches"))
    with service(tmp_path, *flags) as found:
        peaks = Peaks(found)
        for _ in range(3):
            with ThreadPoolExecutor(UPLOADS) as pool:
                list(pool.map(lambda _: give_up_upload(found.url), range(UPLOADS)))
        grown = peaks.grown()
        time.sleep(5)
        kept = {n: held(f, "VmRSS") - peaks.before[n] for n, f in peaks.folders.items()}
    print(f"peaks grew by MB: {grown}, 5 s later {kept}")
    for process in ("ProxyActor", "ImageIngress"):
        assert grown[process] < 600 and kept[process] < 250, process


def give_up_upload(url: str) -> None:
    """Send all but the last byte, then close the connection."""
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as connection:
        head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: {UPLOAD + 1}\r\n\r\n"
        connection.settimeout(2)
        # A refused upload is closed; a held one gets no answer.
        with suppress(OSError):
            connection.sendall(head.encode() + bytes(UPLOAD))
            connection.recv(1)


def received(http: httpx.Client, asked: dict[str, Any], pause_s: float) -> int:
    size, head = 0, b""
    with http.stream("POST", GENERATE, json=asked) as answer:
        for chunk in answer.iter_raw(1 << 20):
            size, head = size + len(chunk), head or chunk[:300]
            time.sleep(pause_s)
    assert answer.status_code == 200, head
    return size


class Peaks:
    """The peak memory of a service's processes since this object was made."""

    def __init__(self, found: Service) -> None:
        names = ("ProxyActor", "ImageIngress", "ImageReplica")
        self.folders = {name: Path(f"/proc/{found.named(name)[0].pid}") for name in names}
        for folder in self.folders.values():
            (folder / "clear_refs").write_text("5")
        self.before = {name: held(folder, "VmRSS") for name, folder in self.folders.items()}

    def grown(self) -> dict[str, float]:
        """Return the growth in MB by process."""
        return {n: held(f, "VmHWM") - self.before[n] for n, f in self.folders.items()}


def held(folder: Path, field: str) -> float:
    line = next(s for s in (folder / "status").read_text().splitlines() if s.startswith(field))
    return round(int(line.split()[1]) * 1024 / 1e6, 1)
