"""A stand-in for torch.cuda with its rules: each thread has one current stream and device; a failed
capture leaves its memory pool open; a pool takes no capture after its last graph is freed.

It computes nothing. It cannot show memory, time, or whether CUDA follows these rules.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

BEGIN, MIDDLE, END = "begin", "middle", "end"
MOMENTS = (BEGIN, MIDDLE, END)
_HANDLES = itertools.count(100)


@dataclass(eq=False)
class FakeStream:
    device_index: int
    cuda_stream: int = field(default_factory=lambda: next(_HANDLES))
    waits_for: list[FakeEvent] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: FakeEvent) -> None:
        self.waits_for.append(event)


@dataclass(eq=False)
class FakeEvent:
    stream: FakeStream | None = None
    at_ms: float = 0.0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.at_ms = stream, 1000 * time.perf_counter()

    def synchronize(self) -> None:
        assert self.stream is not None, "waited for an event that was not recorded"

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


@dataclass
class FakeCuda:
    """`fails` names the moment at which each of the next captures fails."""

    fails: list[str] = field(default_factory=list)
    recording_pools: set[int] = field(default_factory=set)
    released: list[int] = field(default_factory=list)
    graphs: dict[int, int] = field(default_factory=dict)
    """live graphs, by the pool of their capture"""
    capturing: FakeGraph | None = None
    captures: int = 0
    _defaults: dict[int, FakeStream] = field(default_factory=dict)
    _pools: Any = field(default_factory=itertools.count)
    _local: threading.local = field(default_factory=threading.local)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        for name in (
            *("Stream", "stream", "Event", "CUDAGraph", "graph_pool_handle"),
            *("current_stream", "default_stream", "synchronize"),
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        for name in ("endAllocateToPool", "releasePool"):
            method = getattr(self, name)
            monkeypatch.setattr(torch._C, f"_cuda_{name}", method, raising=False)
        return self

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(device.index or 0)

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent()

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def graph_pool_handle(self) -> int:
        return int(next(self._pools))

    def default_stream(self, device: torch.device) -> FakeStream:
        index = device.index or 0
        return self._defaults.setdefault(index, FakeStream(index))

    def current_stream(self, device: torch.device) -> FakeStream:
        current: FakeStream | None = getattr(self._local, "stream", None)
        if current is None or current.device_index != (device.index or 0):
            return self.default_stream(device)
        return current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    @property
    def thread_device(self) -> int:
        """The device that Triton would use."""
        current = getattr(self._local, "stream", None)
        return 0 if current is None else current.device_index

    def synchronize(self, device: torch.device) -> None:
        assert self.capturing is None, "waited for the device during a capture"

    def endAllocateToPool(self, device: int, pool: int) -> None:
        if pool not in self.recording_pools:
            raise RuntimeError(f"not currently recording to mempool_id {pool}")
        self.recording_pools.remove(pool)

    def graph_went(self, pool: int) -> None:
        self.graphs[pool] -= 1

    def releasePool(self, device: int, pool: int) -> None:
        self.released.append(pool)


@dataclass(eq=False)
class FakeGraph:
    """Like PyTorch's: the pool is opened before the capture begins and closed after it ends. An
    error in between leaves the pool open."""

    cuda: FakeCuda
    pool: int = -1
    is_broken: bool = False
    launches: list[Callable[[], None]] = field(default_factory=list)

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        if pool in self.cuda.recording_pools:
            raise RuntimeError(f"already recording to mempool_id {pool}")
        if self.cuda.graphs.get(pool) == 0:
            # PyTorch 2.11 does this on an H200.
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.pool = pool
        self.cuda.recording_pools.add(pool)
        fails = self.cuda.fails
        moment = fails.pop(0) if fails else ""
        if moment == BEGIN:
            raise RuntimeError("CUDA error: cudaStreamBeginCapture")
        assert self.cuda.capturing is None
        self.cuda.capturing = self
        self.is_broken = moment in (MIDDLE, END)
        self.moment = moment

    def launch(self, work: Callable[[], None]) -> None:
        if self.moment == MIDDLE:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.launches.append(work)

    def capture_end(self) -> None:
        if self.cuda.capturing is not self:
            raise RuntimeError("CUDA error: the stream does not capture")
        self.cuda.capturing = None
        if self.is_broken:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error\nduring capture"
            )
        self.cuda.recording_pools.remove(self.pool)
        self.cuda.captures += 1
        self.cuda.graphs[self.pool] = self.cuda.graphs.get(self.pool, 0) + 1
        weakref.finalize(self, self.cuda.graph_went, self.pool)

    def replay(self) -> None:
        for work in self.launches:
            work()
