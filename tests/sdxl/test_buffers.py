"""Unused buffers are kept for the next images, and only as many as one shape can use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdxl import cohort
from sdxl.cohort import BufferPool, Buffers, NewImage, RowSlot
from sdxl.engine import allocate
from tests.fakes import ARCH, axes, fake_conditioning, fake_engines

BUCKETS = (2, 4)


def used(pool: BufferPool, side: int, bucket: int) -> Buffers:
    """What an image had that came and went."""
    start = torch.zeros(ARCH.latent_channels, side, side)
    newcomer = NewImage(fake_conditioning(0, rows=2), 5.0, start)
    made = pool.begin(axes(side, side), [newcomer], bucket, runs=True)
    pool.leave(RowSlot(made, 0))
    return made.buffers


def test_the_same_buffers_serve_the_next_image() -> None:
    pool = BufferPool(fake_engines(BUCKETS))
    first = [used(pool, 16, bucket) for bucket in BUCKETS]
    again = [used(pool, 16, bucket) for bucket in BUCKETS]
    assert all(one is other for one, other in zip(first, again, strict=True))


def test_many_shapes_hold_no_more_than_the_largest_alone() -> None:
    pool = BufferPool(fake_engines(BUCKETS))
    most = 2 * sum(used(pool, 24, bucket).bytes for bucket in BUCKETS)
    for side in (*range(2, 25, 2), 24, 24, *range(2, 25, 2)):
        for bucket in BUCKETS:
            used(pool, side, bucket)
            assert sum(buffers.bytes for buffers in pool._free) <= most


def test_unused_buffers_make_room_for_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that holds one shape's buffers at a time."""
    pool = BufferPool(fake_engines(BUCKETS))
    used(pool, 16, 2)

    def room_for_one(*given: Any) -> torch.Tensor:
        if pool._free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(*given)

    monkeypatch.setattr(cohort, "allocate", room_for_one)
    assert used(pool, 24, 2).key[0] == axes(24, 24)
    pool._free.clear()

    def no_room(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cohort, "allocate", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        used(pool, 16, 2)
