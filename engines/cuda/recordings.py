"""Work that comes again on the same tensors: run at first, recorded the second time, replayed from
then on. Both kinds of engine use it: TensorRT for one call, PyTorch for the whole tick and for the
decoding of a picture.

It knows no networks. What is recorded holds on to addresses: whoever keeps a recording says by
which key the same addresses come again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sdxl.engine import Engine
from sdxl.specs import ModelSpec

Tensors = dict[str, Tensor]
MAX_SHAPES = 4
"""of the pictures that are decoded from recordings"""
MAX_TICKS = 128
"""Recordings kept of whole ticks: two networks, each bucket, a few sets of buffers."""


class CaptureFailed(RuntimeError):
    """Nothing was recorded, and nothing has run."""


class RecordingDevice(Protocol):
    """See cuda_device.py."""

    @property
    def capturing_stream(self) -> int: ...
    def stream(self) -> int: ...
    def allocate(self, size: int) -> Tensor: ...
    def synchronize(self) -> None: ...
    def capture(self, enqueue: Callable[[int], None]) -> Callable[[], None]: ...


@dataclass
class Recording:
    is_warm: bool = False
    """ran once: what libraries prepare on first use is not captured with the rest"""
    replay: Callable[[], None] | None = None
    is_capturable: bool = True
    """was not refused yet"""

    def run(
        self,
        enqueue: Callable[[int], None],
        device: RecordingDevice,
        may_capture: Callable[[], bool],
    ) -> None:
        """`enqueue` puts the work on the stream that it is given."""
        if self.replay is None and self.is_warm and self.is_capturable and may_capture():
            try:
                self.replay = device.capture(enqueue)
            except CaptureFailed:
                # The device has said why. What cannot be recorded still runs.
                self.is_capturable = False
        if self.replay is not None:
            self.replay()
        else:
            enqueue(device.stream())
            self.is_warm = True


@dataclass
class Ticks:
    """`Engines.run_recorded` on a GPU: a tick, from the scaled sample to the scheduler's step."""

    device: RecordingDevice
    recordings: OrderedDict[Hashable, Recording] = field(default_factory=OrderedDict)

    def __call__(self, key: Hashable, work: Callable[[], None]) -> None:
        recording = self.recordings.setdefault(key, Recording())
        self.recordings.move_to_end(key)
        if len(self.recordings) > MAX_TICKS:
            # The one that goes may still be at work.
            self.device.synchronize()
            self.recordings.popitem(last=False)
        recording.run(lambda _: work(), self.device, lambda: True)


@dataclass
class RecordedEngine:
    """An engine whose calls come again by shape, on tensors that do not: it has tensors of its own
    for each shape, and a recording on them."""

    engine: Engine
    device: RecordingDevice
    lanes: OrderedDict[Hashable, tuple[Tensors, Tensors, Recording]] = field(
        default_factory=OrderedDict
    )

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        own_inputs, own_outputs, recording = self._lane(inputs, outputs)
        for name, tensor in own_inputs.items():
            tensor.copy_(inputs[name])
        recording.run(lambda _: self.engine(own_inputs, own_outputs), self.device, lambda: True)
        for name, tensor in own_outputs.items():
            outputs[name].copy_(tensor)

    def _lane(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> tuple[Tensors, Tensors, Recording]:
        key = tuple(tensor.shape for tensor in inputs.values())
        if key not in self.lanes:
            if len(self.lanes) == MAX_SHAPES:
                self.device.synchronize()
                self.lanes.popitem(last=False)
            own, made = (
                {name: torch.empty_like(tensor) for name, tensor in each.items()}
                for each in (inputs, outputs)
            )
            self.lanes[key] = own, made, Recording()
        self.lanes.move_to_end(key)
        return self.lanes[key]
