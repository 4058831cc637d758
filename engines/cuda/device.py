"""The few things that a GPU's engines ask of CUDA. Tests put a double in CUDA's place.

A GPU has a stream for its loop, never CUDA's default one, for which TensorRT would wait at every
call, and another that captures go through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from engines.cuda.recordings import CaptureFailed

log = logging.getLogger(__name__)


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loop_stream = torch.cuda.Stream(device)
        self._capturing = torch.cuda.Stream(device)
        # Graphs replay one after the other and leave nothing in it: they share their memory.
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[Any] = WeakSet()
        """of the pool, that are still there: into one whose last graph is gone PyTorch captures
        nothing more"""
        self.failed_captures = 0

    def for_engines(self) -> dict[str, Any]:
        """What Engines are told of an asynchronous device."""
        return {
            "stream": self.loop_stream,
            "on_stream": self.on_stream,
            "fence": self.fence,
            "calls_ahead": 1,
            "failed_captures": lambda: self.failed_captures,
        }

    def on_stream(self) -> AbstractContextManager[Any]:
        """On the loop's stream, and on this GPU, unless the thread has chosen a stream itself."""
        current = torch.cuda.current_stream(self.device)
        is_chosen = current != torch.cuda.default_stream(self.device)
        return nullcontext() if is_chosen else torch.cuda.stream(self.loop_stream)

    def fence(self) -> Callable[[], None]:
        """Marks what was enqueued so far; calling the result waits until it is computed."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        wait: Callable[[], None] = event.synchronize
        return wait

    def stream(self) -> int:
        """The handle of PyTorch's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    @property
    def capturing_stream(self) -> int:
        """The handle of the stream that captures go through."""
        return int(self._capturing.cuda_stream)

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def capture(self, enqueue: Callable[[int], None]) -> Callable[[], None]:
        """Record what `enqueue` puts on the stream it is given. Nothing of it runs until the
        result is called, which repeats it on the then current stream, with the same addresses.
        Raises CaptureFailed; later captures are not concerned."""
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._capturing):
            try:
                # thread_local: the other threads may go on allocating meanwhile.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                enqueue(self.capturing_stream)
                graph.capture_end()
            except Exception as error:
                self._abandon(graph)
                self._tell(error)
                raise CaptureFailed(str(error)) from error
        self._graphs.add(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def _abandon(self, graph: Any) -> None:
        """PyTorch leaves a failed capture's memory pool open, and would refuse it from then on to
        every other capture."""
        with suppress(RuntimeError):
            # Whatever failed, the stream leaves the capture by this.
            graph.capture_end()
        index = self.loop_stream.device_index
        with suppress(RuntimeError):
            # The pool was closed already if it refuses.
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs = WeakSet()

    def _tell(self, error: Exception) -> None:
        self.failed_captures += 1
        level = logging.WARNING if self.failed_captures == 1 else logging.DEBUG
        line = " ".join(str(error).split())
        log.log(level, "a CUDA graph was not captured, its work runs uncaptured: %s", line)
