"""One seed gives one picture: alone or under load, and on any replica."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eval.measuring.psnr import psnr_db
from serve.orders import Done, ImageOrder
from serve.settings import ServeSettings
from serve.worker.replica import ImageReplica
from tests.serve.test_edits import pixels
from tests.serve.workers import order

ASKED = order("a red circle on a blue background", 3, steps=12)
OTHERS = [
    order(f"a {colour} star", i, steps=6 + 3 * i)
    for i, colour in enumerate(("red", "green", "blue", "white", "black", "purple", "orange"))
]
REQUIRED_DB = 60


async def made(replica: ImageReplica, asked: ImageOrder) -> bytes:
    *_, done = [update async for update in replica.generate(asked)]
    assert isinstance(done, Done), done
    return done.image


@pytest.mark.slow
@pytest.mark.parametrize("is_deterministic", [False, True])
async def test_a_picture_is_the_same_alone_under_load_and_on_either_replica(
    is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.logs.configure", lambda _: None)
    replicas = [ImageReplica(ServeSettings(deterministic=is_deterministic)) for _ in range(2)]
    alone, others = await made(replicas[0], ASKED), list[Any]()
    for replica in replicas:
        together = await asyncio.gather(*(made(replica, each) for each in [ASKED, *OTHERS, ASKED]))
        others += together[:1] + together[-1:]
    if is_deterministic:
        assert all(other == alone for other in others), "other bytes for the same request"
    worst = min(psnr_db(pixels(alone), pixels(other)) for other in others)
    assert worst >= REQUIRED_DB, f"{worst:.1f} dB, needed {REQUIRED_DB}"
