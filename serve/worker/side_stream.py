"""Runs work beside the denoising loop: on a GPU in a separate stream, on a CPU directly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from sdxl.engine import Engines

T = TypeVar("T")
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
        self._loop_stream = engines.stream
        self._stream: torch.cuda.Stream | None = None
        if engines.stream is not None:
            self._stream = torch.cuda.Stream(engines.stream.device)

    @contextmanager
    def beside(self, *read: Tensor) -> Iterator[None]:
        """Run the body in the side stream and wait for its end. `read`: finished tensors of the
        loop that the body reads."""
        if self._stream is None:
            yield
            return
        for tensor in read:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def run(self, function: Callable[[], T]) -> T:
        """Run a function beside the loop and return its result."""
        with self.beside():
            return function()

    def give(self, *made: Tensor) -> None:
        """Hand over tensors that the loop will read."""
        for tensor in made:
            if self._stream is not None and tensor.is_cuda:
                tensor.record_stream(self._loop_stream)
