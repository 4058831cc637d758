"""A stand-in for TensorRT's runtime that computes with the tests' fake engines, by address.

It has the names of the real module, as test_tensorrt_names.py checks. Where the real module is
undefined, the double fails the test: a context used out of order, with too little memory, or while
a graph captured from it is in use.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engines.folders.manifest import spec_as_dict, spec_from_dict
from engines.folders.profiles import Profile
from sdxl.engine import torch_dtype
from sdxl.specs import Architecture, ModelSpec, image_axes, latent_axes
from tests.fakes import ARCH, FakeEngine

BYTES_PER_ELEMENT = 16
"""working memory for each element of the first input"""
STREAM, CAPTURING = 7, 9


def plan_bytes(spec: ModelSpec, profiles: list[Profile]) -> bytes:
    """A plan for the double to deserialise."""
    ranges = [dict(profile.ranges) for profile in profiles]
    text = {"name": spec.name, "spec": spec_as_dict(spec), "profiles": ranges}
    return json.dumps(text).encode()


@dataclass
class FakeDevice:
    """Replaces CudaDevice: streams are numbers, and a capture is a list of calls."""

    blocks: list[Tensor] = field(default_factory=list)
    synchronized: int = 0
    captures: int = 0
    replays: int = 0
    recorded: list[Callable[[], None]] | None = None
    capturing_stream: int = CAPTURING

    def stream(self) -> int:
        return STREAM

    def allocate(self, size: int) -> Tensor:
        self.blocks.append(torch.zeros(size, dtype=torch.uint8))
        return self.blocks[-1]

    def synchronize(self) -> None:
        assert self.recorded is None, "waited for the device during a capture"
        self.synchronized += 1

    def capture(self, enqueue: Callable[[int], None]) -> Callable[[], None]:
        self.captures += 1
        recorded: list[Callable[[], None]] = []
        self.recorded = recorded
        enqueue(CAPTURING)
        self.recorded = None
        assert recorded, "nothing was put on the capturing stream"

        def replay() -> None:
            self.replays += 1
            for launch in recorded:
                launch()

        return replay


class IRuntimeConfig:
    dynamic_shapes_kernel_specialization_strategy = "LAZY"

    def __init__(self) -> None:
        self._strategy = "STATIC"

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self._strategy = strategy


class ICudaEngine:
    def __init__(self, library: TensorRTDouble, spec: ModelSpec, profiles: list[Profile]) -> None:
        self._library, self._spec, self._profiles = library, spec, profiles

    @property
    def num_io_tensors(self) -> int:
        return len(self._spec.tensors)

    def get_tensor_name(self, index: int) -> str:
        return self._spec.tensors[index].name

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, how: Any) -> IExecutionContext:
        if isinstance(how, IRuntimeConfig):
            assert how.dynamic_shapes_kernel_specialization_strategy == "EAGER"
            how = how._strategy
        assert how == "USER_MANAGED", f"{self._spec.name}: the context has memory of its own"
        context = IExecutionContext(self._library, self._spec, self._profiles)
        self._library.contexts.append(context)
        return context


class IExecutionContext:
    def __init__(self, library: TensorRTDouble, spec: ModelSpec, profiles: list[Profile]) -> None:
        self._library, self._spec, self._profiles = library, spec, profiles
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory = (0, -1)
        self._needs: int | None = None
        self._version = 0
        self._is_warm = False

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        self._profile, self._shapes, self._needs = profile_index, {}, None
        self._version += 1
        return profile_index < len(self._profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._version += 1
        ranges = self._profiles[self._profile].ranges
        if name not in ranges or not Profile({name: ranges[name]}).admits({name: shape}):
            return False
        self._shapes[name], self._needs = shape, None
        return True

    def infer_shapes(self) -> list[str]:
        return [t.name for t in self._spec.inputs if t.name not in self._shapes]

    @property
    def _axes(self) -> dict[str, int]:
        axes = self._spec.axes(self._shapes)
        if "latent_h" in axes:
            axes |= image_axes(self._library.arch, axes["latent_h"], axes["latent_w"])
        elif "image_h" in axes:
            axes |= latent_axes(self._library.arch, axes["image_h"], axes["image_w"])
        return axes

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return next(t.shape(self._axes) for t in self._spec.tensors if t.name == name)

    def update_device_memory_size_for_shapes(self) -> int:
        assert not self.infer_shapes(), "asked for the memory before all shapes were set"
        first = self._shapes[self._spec.inputs[0].name]
        self._needs = BYTES_PER_ELEMENT * torch.Size(first).numel()
        return self._needs

    def set_device_memory(self, memory: int, size: int) -> None:
        self._memory = (memory, size)
        self._version += 1

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._version += 1
        self._addresses[name] = memory
        return name in {t.name for t in self._spec.tensors}

    def is_stream_capturable(self, stream: int) -> bool:
        assert stream == CAPTURING
        return self._library.is_capturable

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert self._needs is not None, "enqueued before the memory was asked for"
        memory, size = self._memory
        assert size >= self._needs, f"{size} bytes of working memory, needed {self._needs}"
        assert any(b.data_ptr() == memory for b in self._library.device.blocks)
        assert set(self._addresses) == {t.name for t in self._spec.tensors}
        launch = self._launch(dict(self._addresses))
        if stream_handle == CAPTURING:
            assert self._is_warm, "captured what the library does at a first call"
            assert self._library.is_capturable
            version = self._version
            assert self._library.device.recorded is not None

            def replayed() -> None:
                assert self._version == version, "the context was changed under its graph"
                launch()

            self._library.device.recorded.append(replayed)
        else:
            assert stream_handle == STREAM
            launch()
        self._is_warm = True
        return not self._library.refuses

    def _launch(self, addresses: dict[str, int]) -> Callable[[], None]:
        axes = self._axes

        def launch() -> None:
            tensors = {}
            for t in self._spec.tensors:
                shape, dtype = t.shape(axes), torch_dtype(t)
                count = torch.Size(shape).numel() * dtype.itemsize
                buffer = (ctypes.c_char * count).from_address(addresses[t.name])
                tensors[t.name] = torch.frombuffer(buffer, dtype=dtype).view(shape)
            inputs = {t.name: tensors[t.name] for t in self._spec.inputs}
            outputs = {t.name: tensors[t.name] for t in self._spec.outputs}
            FakeEngine(self._spec)(inputs, outputs)

        return launch


class Runtime:
    def __init__(self, library: TensorRTDouble) -> None:
        self._library = library

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        self._library.deserialized += 1
        try:
            found = json.loads(serialized_engine)
        except ValueError:
            return None
        profiles = [
            Profile({n: (tuple(a), tuple(b), tuple(c)) for n, (a, b, c) in ranges.items()})
            for ranges in found["profiles"]
        ]
        return ICudaEngine(self._library, spec_from_dict(found["name"], found["spec"]), profiles)


@dataclass
class TensorRTDouble:
    """The module. `is_capturable` and `refuses` set the behaviour of its contexts."""

    arch: Architecture = ARCH
    device: FakeDevice = field(default_factory=FakeDevice)
    contexts: list[IExecutionContext] = field(default_factory=list)
    deserialized: int = 0
    is_capturable: bool = True
    refuses: bool = False
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="USER_MANAGED")
    DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="EAGER")

    class Logger:
        WARNING = 2

        def __init__(self, severity: int) -> None:
            pass

    def Runtime(self, logger: Logger) -> Runtime:
        return Runtime(self)
