"""Work beside the denoising loop: on a GPU on its own stream, on a CPU directly.

It knows only when tensors are ready and which streams still read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sdxl.engine import Engines

Mark = torch.cuda.Event | None
"""A point in the loop's stream."""


def mark(engines: Engines) -> Mark:
    if engines.stream is None:
        return None
    event = torch.cuda.Event()
    event.record(engines.stream)
    return event


class SideStream:
    def __init__(self, engines: Engines) -> None:
        self._loops = engines.stream
        own = None if engines.stream is None else torch.cuda.Stream(engines.stream.device)
        self._stream = own

    @contextmanager
    def beside(self, *read: Tensor) -> Iterator[None]:
        """Run beside the loop. `read`: the loop's finished tensors that the work reads. The exit
        waits for the work."""
        if self._stream is None:
            yield
            return
        for tensor in read:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def give(self, *made: Tensor) -> None:
        """Hand over tensors that the loop will read."""
        for tensor in made:
            if self._stream is not None and tensor.is_cuda:
                tensor.record_stream(self._loops)
