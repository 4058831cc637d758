"""The REST application over a worker on fakes, called in process or over a loopback port."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from sdxl.pipeline import Pipeline
from serve.front.api import create_app
from serve.front.keys import sha256
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.serve.workers import running
from tests.waiting import wait_until

GENERATE = "/v1/images/generations"
NO_SETTINGS: Mapping[str, Any] = {}


@asynccontextmanager
async def client(
    worker: Worker, key: str | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_app([worker], ServeSettings(**settings)), key) as found:
        yield found


@asynccontextmanager
async def client_of(app: FastAPI, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client that calls the application in this process, without a socket."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers, timeout=60
    ) as found:
        yield found


def call(
    worker: Worker,
    method: str,
    path: str,
    settings: Mapping[str, Any] = NO_SETTINGS,
    **request: Any,
) -> httpx.Response:
    """Send one request in this process."""

    async def send() -> httpx.Response:
        async with client(worker, **settings) as http:
            return await http.request(method, path, **request)

    return asyncio.run(send())


def post(worker: Worker, body: Any, path: str = GENERATE, **settings: Any) -> httpx.Response:
    return call(worker, "POST", path, settings, json=body)


def leave_midway(http: httpx.Client, path: str, pictures: int, **request: Any) -> None:
    """Send the request twice to measure its duration. Send it a third time and leave after a third
    of that. Return when its pictures were cancelled."""

    def whole() -> float:
        begin = time.monotonic()
        answer = http.post(path, **request)
        assert answer.status_code == 200, answer.text[:300]
        return time.monotonic() - begin

    cancelled = ended(http, "cancelled")
    took = min(whole(), whole())
    with pytest.raises(httpx.ReadTimeout):
        http.post(path, **request, timeout=took / 3)
    needed = cancelled + pictures
    wait_until(lambda: ended(http, "cancelled") >= needed, pause_s=0.1, details=lambda: needed)


def ended(http: httpx.Client, outcome: str) -> float:
    """Return the number of pictures that ended with this outcome."""
    return measured(http, "sdxl_images_total", f'outcome="{outcome}"')


def measured(http: httpx.Client, name: str, label: str = "") -> float:
    """Return the sum of a metric over all processes."""
    lines = http.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and label in line
    )


def file_of_keys(folder: Path, **keys: str) -> str:
    """Write a file of API keys; `keys`: what follows each key's hash, such as its name."""
    file = folder / "keys.txt"
    file.write_text("".join(f"{sha256(key)} {rest}\n" for key, rest in keys.items()))
    return str(file)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """Check that the error's envelope is complete, and return the error."""
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    found: dict[str, Any] = body["error"]
    return found


@contextmanager
def listening(
    pipeline: Pipeline | None = None, queue: int = 64, tracer: Any = None, **settings: Any
) -> Iterator[tuple[str, Worker]]:
    """Run a real server on a free loopback port; yield its URL and the worker behind it."""
    with (
        running(pipeline, queue=queue, tracer=tracer) as worker,
        listening_to(create_app([worker], ServeSettings(**settings))) as url,
    ):
        yield url, worker


@contextmanager
def listening_to(app: Any, log_level: str = "error", **options: Any) -> Iterator[str]:
    """Serve the application and yield its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        # A connection that comes before the server's start waits and is not refused.
        listener.listen()
        config = uvicorn.Config(app, log_level=log_level, lifespan="off", ws="none", **options)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
