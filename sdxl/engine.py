"""The one seam between the sampler and whatever computes a network.

Contract of an Engine, for every backend:

- it is called with every input of its spec by name, contiguous, on its device, in the spec's dtype;
  the UNet's maps may lie channels-last where its Engines ask for that;
- it fills the output tensors it is handed, in place, and returns nothing; it never keeps a
  reference to an input or output beyond the call (a captured graph may remember addresses);
- shapes may differ from call to call along the free axes; what it cannot run it refuses with a
  ShapeError before computing anything;
- on a GPU it enqueues on the current stream and does not synchronise;
- a row's result does not depend on the other rows, beyond rounding.

The sampler does not know whether TensorRT, ONNX Runtime or PyTorch is behind one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sdxl.prompt import MAX_CHUNKS
from sdxl.specs import Architecture, Cut, ModelSpec, ShapeError, TensorSpec, image_axes, latent_axes


class Engine(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Engines:
    """The seven networks of one model on one device; those of specs.OPTIONAL may be missing."""

    arch: Architecture
    by_name: Mapping[str, Engine]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    cut: Cut = "reference"
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Row counts a UNet call is padded to; the largest bounds one call."""
    decode_batch: int = 1
    """Pictures that are best decoded in one call."""
    stream: Any = None
    """On a GPU, what the loop's calls are enqueued on: others wait for it, and it for them."""
    on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around whatever is enqueued: on the loop's stream, unless the thread has chosen one
    of its own."""
    memory_format: torch.memory_format = torch.contiguous_format
    """How the UNet's maps lie in the loop's buffers, so that no call turns them around."""
    fence: Callable[[], Callable[[], None]] = lambda: _done
    """Marks what was enqueued so far; calling the result waits until it is computed."""
    calls_ahead: int = 0
    """Calls that may be on their way while the host prepares the next: 0 where calls block."""
    run_recorded: Callable[[Hashable, Callable[[], None]], None] = lambda _, work: work()
    """Runs `work`. The same key means the same tensor addresses, so a GPU backend may record the
    work as a CUDA graph, and replay that."""
    failed_captures: Callable[[], int] = lambda: 0
    """How often a recording was tried and refused; its work runs unrecorded."""
    warming: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while a service warms up: the time to measure what makes later calls quicker."""
    latent_sides: tuple[int, int] | None = None
    """The smallest and the largest side that the engines were built for; None: any."""
    most_chunks: int = MAX_CHUNKS
    """Of the longest prompt that the engines were built for."""
    description: Mapping[str, Any] = field(default_factory=dict)
    """What runs behind them (backend, precision, …), for logs and metadata."""

    def __getitem__(self, name: str) -> Engine:
        return self.by_name[name]


def _done() -> None:
    pass


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def allocate(
    spec: TensorSpec,
    axes: Mapping[str, int],
    device: torch.device | str = "cpu",
    layout: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """`layout` is of maps; what is no map has only one."""
    if len(spec.dims) != 4:
        layout = torch.contiguous_format
    dims, dtype = spec.shape(axes), torch_dtype(spec)
    return torch.empty(dims, dtype=dtype, device=device, memory_format=layout)


def check_inputs(spec: ModelSpec, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """The free axes of a call, after checking its inputs against the spec."""
    for tensor in spec.inputs:
        found = inputs.get(tensor.name)
        if found is not None and found.dtype != torch_dtype(tensor):
            raise ShapeError(
                f"{spec.name}: input {tensor.name!r} is {found.dtype}, expected {tensor.dtype}"
            )
    return spec.axes({name: tuple(value.shape) for name, value in inputs.items()})


def call(engine: Engine, arch: Architecture, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run an engine into fresh outputs."""
    axes = check_inputs(engine.spec, inputs)
    if "latent_h" in axes:
        axes |= image_axes(arch, axes["latent_h"], axes["latent_w"])
    elif "image_h" in axes:
        axes |= latent_axes(arch, axes["image_h"], axes["image_w"])
    device = next(iter(inputs.values())).device
    outputs = {t.name: allocate(t, axes, device) for t in engine.spec.outputs}
    engine(inputs, outputs)
    return outputs


def to_host(tensor: Tensor, engines: Engines) -> Tensor:
    """Without waiting where the device is asynchronous: whoever reads it waits for a fence. From
    memory that is not pinned a copy would wait, and take three times as long."""
    if engines.device.type == "cpu":
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
