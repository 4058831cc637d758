"""One seed gives one picture: alone or under load, and on any replica."""

from __future__ import annotations

import asyncio

import pytest

from serve.orders import Done, ImageOrder
from serve.settings import ServeSettings
from serve.worker.replica import ImageReplica
from tests.serve.workers import order

ASKED = order("a red circle on a blue background", 3, steps=12)
OTHERS = [
    order(f"a {colour} star", i, steps=6 + 3 * i)
    for i, colour in enumerate(("red", "green", "blue", "white", "black", "purple", "orange"))
]


async def made(replica: ImageReplica, asked: ImageOrder) -> bytes:
    *_, done = [update async for update in replica.generate(asked)]
    assert isinstance(done, Done), done
    return done.image


@pytest.mark.slow
async def test_a_picture_is_the_same_alone_under_load_and_on_either_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.logs.configure", lambda _: None)
    replicas = [ImageReplica(ServeSettings(deterministic=True)) for _ in range(2)]
    assert replicas[0].worker.pipeline.is_deterministic, "a processor may round alike without it"
    pictures = [await made(replicas[0], ASKED)]
    for replica in replicas:
        together = await asyncio.gather(*(made(replica, each) for each in [ASKED, *OTHERS, ASKED]))
        pictures += together[0], together[-1]
    assert len(set(pictures)) == 1, "other bytes for the same request"
