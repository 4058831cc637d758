"""Records work that recurs on the same tensors, and replays it. TensorRT records a call, PyTorch a
whole tick and a picture's decoding.

A recording holds addresses: its owner keeps it under a key that stands for them. It knows no
networks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sdxl.engine import Engine
from sdxl.specs import ModelSpec

Tensors = dict[str, Tensor]
MOST_TICKS = 1024
"""recordings of ticks: two networks and nine buckets of 56 sizes"""
MOST_DECODER_BYTES = 512 << 20
"""of the tensors that decodings are recorded on: 6 MB a megapixel"""
MOST_FAILURES = 2
"""captures of the same work that may fail; a library may prepare more than a first run used"""


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
    """libraries are prepared, so that a capture holds none of their preparations"""
    replay: Callable[[], None] | None = None
    failures: int = 0

    def run(
        self,
        enqueue: Callable[[int], None],
        device: RecordingDevice,
        may_capture: Callable[[], bool],
    ) -> bool:
        """Run, capture or replay the work, which `enqueue` puts on a stream. Return whether it took
        its usual time: a first run prepares, and a capture takes longer than its work."""
        if self.replay is not None:
            self.replay()
            return True
        was_warm = self.is_warm
        if was_warm and self.failures < MOST_FAILURES and may_capture():
            try:
                self.replay = device.capture(enqueue)
            except CaptureFailed:
                # The device has logged the cause; the work still runs.
                self.failures += 1
            else:
                self.replay()
                return False
        enqueue(device.stream())
        self.is_warm = True
        return was_warm and self.failures in (0, MOST_FAILURES)


@dataclass
class Ticks:
    """`Engines.run_recorded` on a GPU: records ticks, from scaled sample to scheduler step. The
    first tick of each network runs unrecorded, which prepares libraries for all its ticks."""

    device: RecordingDevice
    recordings: OrderedDict[Hashable, Recording] = field(default_factory=OrderedDict)
    counts: Counter[str] = field(default_factory=Counter)
    """first runs, captures, replays and evictions so far"""
    is_measuring: bool = False
    """True if a first run may measure, which a capture does not allow"""
    _networks: set[str] = field(default_factory=set)

    def __call__(self, network: str, key: Hashable, work: Callable[[], None]) -> bool:
        if key not in self.recordings:
            is_warm = network in self._networks and not self.is_measuring
            self.recordings[key] = Recording(is_warm)
        recording = self.recordings[key]
        self.recordings.move_to_end(key)
        if len(self.recordings) > MOST_TICKS:
            # The evicted recording may still be running.
            self.device.synchronize()
            self.recordings.popitem(last=False)
            self.counts["evicted"] += 1
        was_recorded = recording.replay is not None
        is_usual = recording.run(lambda _: work(), self.device, lambda: True)
        self._networks.add(network)
        is_recorded = recording.replay is not None
        kind = "replayed" if was_recorded else "captured" if is_recorded else "unrecorded"
        self.counts[kind] += 1
        return is_usual


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
            own, made = (
                {name: torch.empty_like(tensor) for name, tensor in each.items()}
                for each in (inputs, outputs)
            )
            self.lanes[key] = own, made, Recording()
            while len(self.lanes) > 1 and self._bytes > MOST_DECODER_BYTES:
                self.device.synchronize()
                self.lanes.popitem(last=False)
        self.lanes.move_to_end(key)
        return self.lanes[key]

    @property
    def _bytes(self) -> int:
        lanes = self.lanes.values()
        return sum(t.nbytes for own, made, _ in lanes for t in (*own.values(), *made.values()))
