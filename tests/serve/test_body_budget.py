"""A front end holds bounded bytes of request bodies, for all clients together and for each key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sdxl.params import InvalidParams
from serve.settings import ServeSettings
from serve.worker.worker import Worker
from tests.serve.servers import GENERATE, client, error_of, file_of_keys

SIZE = 5000
LIMITS: dict[str, Any] = {"max_body_bytes": SIZE, "max_edit_bytes": SIZE, "max_file_bytes": 1}
TWO_BODIES = LIMITS | {"max_bodies_bytes": 2 * SIZE}


@asynccontextmanager
async def uploads(http: httpx.AsyncClient, *keys: str, **headers: str) -> AsyncIterator[None]:
    """Begin uploads; finish them at the end of the block."""
    begun = [asyncio.Event() for _ in keys]
    may_end = asyncio.Event()

    async def body(is_begun: asyncio.Event) -> AsyncIterator[bytes]:
        yield b" " * (SIZE - 1)
        is_begun.set()
        await may_end.wait()
        yield b"{"

    tasks = [
        asyncio.create_task(http.post(GENERATE, content=body(each), headers=by(key) | headers))
        for key, each in zip(keys, begun, strict=True)
    ]
    try:
        for each in begun:
            await asyncio.wait_for(each.wait(), 20)
        yield
    finally:
        may_end.set()
        answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [400] * len(keys)


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def chunks(size: int) -> AsyncIterator[bytes]:
    yield b" " * size


@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_body_beyond_the_budget_is_a_503_for_now(worker: Worker, is_declared: bool) -> None:
    content = {"content-length": str(SIZE)} if is_declared else {}
    async with client(worker, **TWO_BODIES) as http:
        async with uploads(http, "", "", **content):
            refused = await http.post(GENERATE, content=b" " * 20)
            assert (refused.status_code, error_of(refused)["code"]) == (503, "bodies_full")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await http.get("/healthz")).status_code == 200
        for _ in range(3):
            after = await http.post(GENERATE, content=chunks(SIZE))
            assert after.status_code == 400, after.text


async def test_one_key_holds_at_most_half(worker: Worker, tmp_path: Path) -> None:
    keys = file_of_keys(tmp_path, a="ann", b="bob")
    async with client(worker, keys=keys, **TWO_BODIES) as http, uploads(http, "a"):
        statuses = [
            (await http.post(GENERATE, content=b"  ", headers=by(key))).status_code for key in "ab"
        ]
    assert statuses == [503, 400]


def test_the_budget_has_room_for_two_of_the_largest_bodies() -> None:
    with pytest.raises(InvalidParams, match="max_bodies_bytes must be at least 10000"):
        ServeSettings(**LIMITS, max_bodies_bytes=2 * SIZE - 1)
    assert ServeSettings(**LIMITS).bodies_bytes == 4 * SIZE
