"""The few things that a compiled engine asks of CUDA. Tests put a double in its place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._capturing = torch.cuda.Stream(device)
        # Graphs replay one after the other and leave nothing in it: they share their memory.
        self._pool = torch.cuda.graph_pool_handle()

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
        result is called, which repeats it on the then current stream, with the same addresses."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capturing):
            # thread_local: the other threads may go on allocating meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                enqueue(self.capturing_stream)
            finally:
                graph.capture_end()
        return graph.replay
