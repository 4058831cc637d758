"""Records work that is repeated on the same tensors, and replays it. TensorRT records a call,
PyTorch a whole tick and a picture's decoding.

A recording contains addresses, so its owner stores it under a key that identifies them. It knows no
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
"""bytes of the tensors of recorded decodings, 6 MB a megapixel"""
MOST_FAILURES = 2
"""failed captures of the same work before it always runs uncaptured; a library may need to prepare
more than the first run did"""


class CaptureFailed(RuntimeError):
    """The work was not recorded, and did not run."""


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
    """The libraries are prepared, so a capture contains no preparations."""
    replay: Callable[[], None] | None = None
    failures: int = 0

    def run(
        self,
        enqueue: Callable[[int], None],
        device: RecordingDevice,
        may_capture: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Run, capture or replay the work that `enqueue` puts on a stream. Return whether it took
        the usual time: a first run with preparations or a capture takes longer."""
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
    """Implements `Engines.run_recorded` on a GPU: records ticks, from the scaled sample to the
    scheduler's step. The first tick of each network runs unrecorded and prepares libraries for all
    its ticks."""

    device: RecordingDevice
    recordings: OrderedDict[Hashable, Recording] = field(default_factory=OrderedDict)
    counts: Counter[str] = field(default_factory=Counter)
    """first runs, captures, replays and evictions so far"""
    is_measuring: bool = False
    """A first run may measure, which is impossible in a capture."""
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
        is_usual = recording.run(lambda _: work(), self.device)
        self._networks.add(network)
        is_recorded = recording.replay is not None
        kind = "replayed" if was_recorded else "captured" if is_recorded else "unrecorded"
        self.counts[kind] += 1
        return is_usual


@dataclass
class RecordedEngine:
    """An engine called with the same shapes but other tensors. It copies to its own tensors for
    each shape, and records on them."""

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
        recording.run(lambda _: self.engine(own_inputs, own_outputs), self.device)
        for name, tensor in own_outputs.items():
            outputs[name].copy_(tensor)

    def _lane(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> tuple[Tensors, Tensors, Recording]:
        key = tuple(tensor.shape for tensor in inputs.values())
        if key not in self.lanes:
            own_inputs, own_outputs = (
                {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
                for tensors in (inputs, outputs)
            )
            self.lanes[key] = own_inputs, own_outputs, Recording()
            while len(self.lanes) > 1 and self._bytes > MOST_DECODER_BYTES:
                self.device.synchronize()
                self.lanes.popitem(last=False)
        self.lanes.move_to_end(key)
        return self.lanes[key]

    @property
    def _bytes(self) -> int:
        return sum(
            tensor.nbytes
            for inputs, outputs, _ in self.lanes.values()
            for tensor in (*inputs.values(), *outputs.values())
        )
