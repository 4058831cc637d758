"""TensorRT plans as Engines, for both TensorRTs.

A call binds its tensors by address. It copies nothing and does not wait. Calls on the loop's
buffers, which are always the same tensors, become CUDA graphs. A graph contains the state of its
context, so each graph has its own context. All contexts use one block of working memory, one after
the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engines.cuda.recordings import Recording, RecordingDevice
from engines.folders.profiles import Profile, choose
from engines.trt.flavours import BackendFailed
from sdxl.engine import check_inputs
from sdxl.specs import ModelSpec, ShapeError, TensorSpec

MAX_LANES = 128
"""the most contexts of one engine, one for each shape or set of tensors: enough for 16 numbers of
rows at eight sizes"""

Key = tuple[tuple[int, ...], ...]


class TensorRTError(BackendFailed):
    """A plan cannot be loaded or run."""


class Scratch:
    """Working memory of engines that never run at the same time. A larger shape replaces the block
    by a larger one; graphs on the old block must then be captured again."""

    def __init__(self, device: RecordingDevice) -> None:
        self._device = device
        self._block: Tensor | None = None

    @property
    def address(self) -> int:
        return 0 if self._block is None else self._block.data_ptr()

    @property
    def size(self) -> int:
        return 0 if self._block is None else self._block.numel()

    def reserve(self, size: int) -> None:
        if size > self.size:
            self._device.synchronize()
            self._block = None
            self._block = self._device.allocate(size)


@dataclass
class Lane:
    """A context for one set of shapes or tensors, and its graph."""

    context: Any
    recording: Recording
    captured_on: int = 0
    """address of the graph's working memory"""


class TensorRTEngine:
    """One plan. With `captures`, calls use the same tensors again and are captured as graphs."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Any,
        profiles: Sequence[Profile],
        new_context: Callable[[Any], Any],
        device: RecordingDevice,
        scratch: Scratch,
        *,
        captures: bool,
        bank: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.spec, self._bank = spec, bank or {}
        self._plan, self._profiles = plan, profiles
        self._new_context = new_context
        self._device, self._scratch = device, scratch
        self._captures = captures
        self._lanes: OrderedDict[Key, Lane] = OrderedDict()
        _check_tensors(spec, plan)

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        check_inputs(self.spec, inputs)
        tensors = [self._contiguous(t, inputs) for t in self.spec.inputs]
        tensors += [self._bank[t.name] for t in self.spec.bank]
        tensors += [self._contiguous(t, outputs) for t in self.spec.outputs]
        lane = self._lane(tensors)
        if lane.captured_on != self._scratch.address:
            lane.recording.replay, lane.captured_on = None, self._scratch.address
        lane.recording.run(
            lambda stream: self._enqueue(lane, tensors, stream),
            self._device,
            lambda: self._captures and self._is_capturable(lane),
        )

    def _contiguous(self, spec: TensorSpec, tensors: Mapping[str, Tensor]) -> Tensor:
        tensor = tensors[spec.name]
        if not tensor.is_contiguous():
            raise ShapeError(
                f"{self.spec.name}: {spec.name!r} has strides {tensor.stride()}, "
                "expected a contiguous tensor"
            )
        return tensor

    def _lane(self, tensors: Sequence[Tensor]) -> Lane:
        key = tuple(tuple(t.shape) for t in tensors)
        if self._captures:
            key += (tuple(t.data_ptr() for t in tensors),)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._prepare(tensors)
            if len(self._lanes) > MAX_LANES:
                # The evicted context may still be running.
                self._device.synchronize()
                self._lanes.popitem(last=False)
        self._lanes.move_to_end(key)
        return lane

    def _prepare(self, tensors: Sequence[Tensor]) -> Lane:
        shapes = {
            spec.name: tuple(tensor.shape)
            for spec, tensor in zip(self.spec.tensors, tensors, strict=True)
        }
        inputs = {spec.name: shapes[spec.name] for spec in self.spec.all_inputs}
        profile = choose(self.spec.name, self._profiles, inputs)
        context = self._new_context(self._plan)
        stream = self._device.stream()
        self._check_accepted(
            context.set_optimization_profile_async(profile, stream), "profile", profile
        )
        for name, shape in inputs.items():
            self._check_accepted(context.set_input_shape(name, shape), name, shape)
        if unknown := context.infer_shapes():
            raise TensorRTError(f"{self.spec.name}: TensorRT cannot infer the shapes of {unknown}")
        for spec in self.spec.outputs:
            if (needed := tuple(context.get_tensor_shape(spec.name))) != shapes[spec.name]:
                raise ShapeError(
                    f"{self.spec.name}: output {spec.name!r} has shape {shapes[spec.name]}, "
                    f"expected {needed}"
                )
        self._scratch.reserve(int(context.update_device_memory_size_for_shapes()))
        return Lane(context, Recording())

    def _enqueue(self, lane: Lane, tensors: Sequence[Tensor], stream: int) -> None:
        lane.context.set_device_memory(self._scratch.address, self._scratch.size)
        for spec, tensor in zip(self.spec.tensors, tensors, strict=True):
            address = tensor.data_ptr()
            self._check_accepted(
                lane.context.set_tensor_address(spec.name, address), spec.name, address
            )
        self._check_accepted(lane.context.execute_async_v3(stream), "stream", stream)

    def _is_capturable(self, lane: Lane) -> bool:
        """Return whether tensorrt-rtx can capture the network. tensorrt always can."""
        is_capturable = getattr(lane.context, "is_stream_capturable", None)
        return is_capturable is None or bool(is_capturable(self._device.capturing_stream))

    def _check_accepted(self, is_accepted: bool, name: str, value: object) -> None:
        if not is_accepted:
            raise TensorRTError(f"{self.spec.name}: TensorRT refused {name} = {value}")


def _check_tensors(spec: ModelSpec, plan: Any) -> None:
    names = {plan.get_tensor_name(i) for i in range(plan.num_io_tensors)}
    if names != (needed := {t.name for t in spec.tensors}):
        raise TensorRTError(
            f"{spec.name}: the plan has the tensors {sorted(names)}, expected {sorted(needed)}"
        )
