"""Records work that recurs on the same tensors: it runs at first, is recorded the second time, and
replayed from then on. TensorRT records a call, PyTorch a whole tick and a picture's decoding.

A recording holds addresses: its owner keeps it under a key that stands for them. It knows no
networks.
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
"""of decoded pictures"""
MAX_TICKS = 128
"""recordings of ticks: two networks, each bucket, a few sets of buffers"""


class CaptureFailed(RuntimeError):
    """Nothing was recorded, and nothing ran."""


class RecordingDevice(Protocol):
    """See engines/cuda/device.py."""

    @property
    def capturing_stream(self) -> int: ...
    def stream(self) -> int: ...
    def allocate(self, size: int) -> Tensor: ...
    def synchronize(self) -> None: ...
    def capture(self, enqueue: Callable[[int], None]) -> Callable[[], None]: ...


@dataclass
class Recording:
    is_warm: bool = False
    """ran once, so that libraries' preparations are not captured"""
    replay: Callable[[], None] | None = None
    is_capturable: bool = True
    """no capture has failed yet"""

    def run(
        self,
        enqueue: Callable[[int], None],
        device: RecordingDevice,
        may_capture: Callable[[], bool],
    ) -> None:
        """Run, capture or replay the work, which `enqueue` puts on a stream."""
        if self.replay is None and self.is_warm and self.is_capturable and may_capture():
            try:
                self.replay = device.capture(enqueue)
            except CaptureFailed:
                # The device has logged the cause; the work still runs.
                self.is_capturable = False
        if self.replay is not None:
            self.replay()
        else:
            enqueue(device.stream())
            self.is_warm = True


@dataclass
class Ticks:
    """`Engines.run_recorded` on a GPU: records ticks, from scaled sample to scheduler step."""

    device: RecordingDevice
    recordings: OrderedDict[Hashable, Recording] = field(default_factory=OrderedDict)

    def __call__(self, key: Hashable, work: Callable[[], None]) -> None:
        recording = self.recordings.setdefault(key, Recording())
        self.recordings.move_to_end(key)
        if len(self.recordings) > MAX_TICKS:
            # The evicted recording may still be running.
            self.device.synchronize()
            self.recordings.popitem(last=False)
        recording.run(lambda _: work(), self.device, lambda: True)


@dataclass
class RecordedEngine:
    """An engine whose shapes recur, but not its tensors: it copies to its own tensors for each
    shape, and records on them."""

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
