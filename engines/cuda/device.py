"""This machine's GPU, and CUDA's streams, fences and captures for its engines.

The loop has its own stream, because TensorRT waits on CUDA's default stream at every call. Captures
use another stream.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from engines.cuda.recordings import CaptureFailed
from engines.folders.targets import Target, target_of

log = logging.getLogger(__name__)
_captures = threading.RLock()
"""held during a capture, and during a wait for the whole device: CUDA refuses one while any thread
captures"""


def local_target(device: torch.device | None = None) -> Target | None:
    """Return the given GPU, or else the current one; None if there is no GPU."""
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties(numbered(device))
    return target_of(gpu.name, (gpu.major, gpu.minor), gpu.total_memory)


def numbered(device: torch.device | None = None) -> torch.device:
    """Return the device with an index, as tensors have it. "cuda" is the current GPU."""
    if device is None or device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def wait_for(device: torch.device) -> None:
    with _captures:
        torch.cuda.synchronize(device)


class CudaFence:
    """A point in a stream; implements `Fence`."""

    def __init__(self, stream: Any) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: CudaFence) -> float:
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loop_stream = torch.cuda.Stream(device)
        self._capturing = torch.cuda.Stream(device)
        # All graphs share one pool: they replay one after the other and leave nothing in it.
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[Any] = WeakSet()
        """the pool's live graphs; PyTorch cannot capture into a pool whose graphs are all gone"""
        self.failed_captures = 0

    def for_engines(self) -> dict[str, Any]:
        """The fields of `Engines` that an asynchronous device sets."""
        return {
            "stream": self.loop_stream,
            "on_stream": self.on_stream,
            "fence": self.fence,
            "calls_ahead": 1,
            "failed_captures": lambda: self.failed_captures,
        }

    def on_stream(self) -> AbstractContextManager[Any]:
        """Use this GPU and the loop's stream, unless the thread has already chosen a stream."""
        current = torch.cuda.current_stream(self.device)
        is_chosen = current != torch.cuda.default_stream(self.device)
        return nullcontext() if is_chosen else torch.cuda.stream(self.loop_stream)

    def fence(self) -> CudaFence:
        return CudaFence(torch.cuda.current_stream(self.device))

    def stream(self) -> int:
        """Return the handle of PyTorch's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    @property
    def capturing_stream(self) -> int:
        """The handle of the stream for captures."""
        return int(self._capturing.cuda_stream)

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        wait_for(self.device)

    def capture(self, enqueue: Callable[[int], None]) -> Callable[[], None]:
        """Record the work that `enqueue` puts on its stream. Calling the result runs this work on
        the stream that is current then, at the same addresses. A failed capture does not affect
        later ones."""
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        with _captures, torch.cuda.stream(self._capturing):
            try:
                # thread_local: other threads may allocate meanwhile.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                enqueue(self.capturing_stream)
                graph.capture_end()
            except Exception as error:
                self._abandon(graph)
                self._log_failure(error)
                raise CaptureFailed(str(error)) from error
        self._graphs.add(graph)
        return graph.replay

    def _abandon(self, graph: Any) -> None:
        """Close the memory pool. PyTorch leaves it open, and later captures could not use it."""
        with suppress(RuntimeError):
            # Ends the stream's capture even if it raises.
            graph.capture_end()
        index = self.loop_stream.device_index
        with suppress(RuntimeError):
            # Raises if the pool is already closed.
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = WeakSet()

    def _log_failure(self, error: Exception) -> None:
        self.failed_captures += 1
        level = logging.WARNING if self.failed_captures == 1 else logging.DEBUG
        line = " ".join(str(error).split())
        log.log(level, "a CUDA graph was not captured, its work runs uncaptured: %s", line)
