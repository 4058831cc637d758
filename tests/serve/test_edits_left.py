"""Clients that leave during an edit: at any point, its work ends within a tick."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest

from serve.front import edits, request_reader
from serve.worker.worker import Worker
from tests.serve.servers import client, listening
from tests.serve.test_edits import EDIT, PROMPT, QUICK, hole, png
from tests.serve.workers import fake
from tests.waiting import wait_until

SOON_S = 20.0
UNETS = ("unet_deep", "unet_shallow")
KINDS: dict[str, tuple[dict[str, bytes], dict[str, str]]] = {
    "image": ({"image": png()}, {"strength": "1.0"}),
    "mask": ({"image": png(), "mask": hole()}, {}),
    "second leg": ({"image": png(64, 64)}, {"strength": "0.1", "upscale": "2"}),
}
"""requests for a picture of the model's own size"""


def unet_calls(worker: Worker) -> list[dict[str, tuple[int, ...]]]:
    return [call for name in UNETS for call in fake(worker.pipeline, name).calls]


class Held:
    """Blocks a worker's third UNet call of the model's own size until released."""

    def __init__(self, worker: Worker) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._worker = worker
        self._before = self._count()
        for name in UNETS:
            fake(worker.pipeline, name).on_call = self._hold

    def _count(self) -> int:
        return sum(call["sample"][2] == 16 for call in unet_calls(self._worker))

    def _hold(self) -> None:
        if self._count() - self._before == 3:
            self.begun.set()
            assert self.may_end.wait(SOON_S)


@pytest.mark.parametrize("is_streamed", ["true", "false"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_call_follows_the_one_that_runs_when_the_client_leaves(
    kind: str, is_streamed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    files, fields = KINDS[kind]
    asked = {"prompt": PROMPT, "steps": "20", "stream": is_streamed, "deadline_s": "100", **fields}

    async def leave(url: str, call: Held) -> None:
        async with httpx.AsyncClient(timeout=SOON_S) as http:
            asking = asyncio.create_task(http.post(url + EDIT, data=asked, files=files))
            assert await asyncio.to_thread(call.begun.wait, SOON_S)
            asking.cancel()

    with listening() as (url, worker):
        call, denoiser = Held(worker), worker._started().denoiser
        asyncio.run(leave(url, call))
        wait_until(lambda: worker.is_idle, SOON_S, 0.005)
        before = len(unet_calls(worker))
        call.may_end.set()
        wait_until(lambda: not denoiser.here and not denoiser.loop._images, SOON_S, 0.005)
        assert len(unet_calls(worker)) == before
    assert "Exception" not in capfd.readouterr().err


def test_a_client_that_leaves_within_its_body_orders_nothing() -> None:
    def endless() -> Any:
        yield b"--a\r\n"
        time.sleep(0.3)
        raise ConnectionError("gone")

    with listening() as (url, worker):
        before = len(unet_calls(worker))
        headers = {"content-type": "multipart/form-data; boundary=a"}
        with pytest.raises(ConnectionError):
            httpx.post(url + EDIT, content=endless(), headers=headers)
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert len(unet_calls(worker)) == before and worker.is_idle


async def test_images_are_decoded_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, worker: Worker
) -> None:
    """Otherwise only the number of leaving clients would bound the memory."""
    at_once, most, done = 0, 0, 0
    lock, read = threading.Lock(), edits.read_images

    def slow(*given: Any) -> Any:
        nonlocal at_once, most, done
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.2)
        with lock:
            at_once, done = at_once - 1, done + 1
        return read(*given)

    monkeypatch.setattr(request_reader, "read_images", slow)
    async with client(worker) as http:
        for _ in range(6):
            asked = http.post(EDIT, data=QUICK, files={"image": png()})
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asked, 0.05)
        answer = await http.post(EDIT, data=QUICK, files={"image": png()})
    assert answer.status_code == 200 and most == 1, f"{most} pictures were decoded at once"
    assert done < 7, "pictures were decoded that nobody waited for any more"
