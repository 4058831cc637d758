"""The interface between the sampler and the backends.

Contract of an Engine, for every backend:

- a call gives every input of the spec by name, contiguous, on the device, in the spec's dtype; the
  UNet's maps are channels-last if Engines.memory_format says so;
- a call fills the given output tensors in place and returns nothing; the engine keeps no reference
  to an input or output after the call (a captured graph may keep addresses);
- the free axes may differ between calls; the engine raises ShapeError for a shape that it does not
  support, before it computes anything;
- on a GPU a call enqueues work on the current stream and does not synchronise;
- a row's result does not depend on the other rows, except for rounding;
- maps in slots (Engines.slot_of) are [rows, channels, 1, slot] and come with one more input,
  "sides": int32 [rows, 2], each row's latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sdxl.adapters import AdapterShelf, ControlNet, ImageAdapter, Shelf
from sdxl.flight import PLAIN, Variant
from sdxl.prompt import MAX_CHUNKS
from sdxl.specs import (
    IMAGE_COUNTS,
    IMAGE_TOKENS,
    Architecture,
    Axes,
    Cut,
    ModelSpec,
    ShapeError,
    TensorSpec,
    image_axes,
    latent_axes,
    level_axes,
)


class Engine(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None: ...


class Fence(Protocol):
    """A point in the work enqueued on a device."""

    def wait(self) -> None: ...

    def seconds_since(self, earlier: Any) -> float | None:
        """Return the device's seconds since an earlier fence; both must have been passed. None if
        calls block, so that the host's clock can measure them."""
        ...


class PassedFence:
    """The fence of engines whose calls block."""

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: PassedFence) -> None:
        return None


def no_slot(latent_h: int, latent_w: int) -> None:
    return None


def run_directly(network: str, key: Hashable, work: Callable[[], None]) -> bool:
    work()
    return True


@dataclass(frozen=True)
class Engines:
    """The seven networks of a model on one device; the networks in specs.OPTIONAL may be missing.
    With `adapters`, also the networks in specs.VARIANTS."""

    arch: Architecture
    by_name: Mapping[str, Engine]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    cut: Cut = "reference"
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Row counts that UNet calls are padded to; the largest is the most rows of a call."""
    decode_batch: int = 1
    """The best number of pictures in one decoder call."""
    stream: Any = None
    """The stream of the loop's calls on a GPU; other streams synchronise with it."""
    on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context for GPU work: selects the loop's stream unless the thread has selected another."""
    memory_format: torch.memory_format = torch.contiguous_format
    """The memory layout of the UNet's maps in the loop's buffers."""
    fence: Callable[[], Fence] = PassedFence
    """Marks the work enqueued so far."""
    calls_ahead: int = 0
    """The calls that may run while the host prepares the next one; 0 if calls block."""
    run_recorded: Callable[[str, Hashable, Callable[[], None]], bool] = run_directly
    """Runs a network's work. Equal keys mean equal tensor addresses, so a GPU backend may record
    the work as a CUDA graph and replay it. Returns False for a first run, which takes longer."""
    failed_captures: Callable[[], int] = lambda: 0
    """The number of failed recordings, whose work runs unrecorded."""
    compiled_kernels: Callable[[], int] = lambda: 0
    """The number of kernels that this process compiled."""
    warming: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context for warm-up, in which the backend may spend time on measurements."""
    slot_of: Callable[[int, int], int | None] = no_slot
    """Returns the pixels of the slot for a latent height and width. Pictures of several sizes share
    calls in slots of one size. None: only equal sizes share calls."""
    adapters: AdapterShelf | None = None
    """LoRAs of requests; None if the engines cannot apply LoRAs."""
    controls: Shelf[ControlNet] | None = None
    """ControlNets of requests; None if the engines cannot apply ControlNets."""
    image_prompts: Shelf[ImageAdapter] | None = None
    """Image adapters of requests; None if the engines cannot apply image prompts."""
    latent_sides: tuple[int, int] | None = None
    """The smallest and largest latent side of the engines; None: any."""
    most_chunks: int = MAX_CHUNKS
    """The chunks of the longest prompt that the engines support."""
    most_images: int = IMAGE_COUNTS[-1]
    """The most image prompts of a picture; those with the same adapter, steps and mode are one."""
    most_image_tokens: int = IMAGE_TOKENS[-1]
    """The most tokens of an image prompt."""
    description: Mapping[str, Any] = field(default_factory=dict)
    """Backend, precision and versions, for logs and metadata."""

    def __getitem__(self, name: str) -> Engine:
        return self.by_name[name]

    def of(self, network: str, variant: Variant) -> Engine:
        """Return the engine that runs a network with a variant."""
        return self.by_name[variant.graph(network)]

    def slot(self, latent_h: int, latent_w: int, variant: Variant = PLAIN) -> int | None:
        """Return the pixels of a picture's slot; None with ControlNets or LoRAs of convolutions,
        which do not support slots."""
        if variant.name == "locon" or variant.is_controlled:
            return None
        return self.slot_of(latent_h, latent_w)

    def axes(self, latent_h: int, latent_w: int, tokens: int, variant: Variant = PLAIN) -> Axes:
        """Return the axes that pictures must have in common to share calls."""
        slot = self.slot(latent_h, latent_w, variant)
        if slot is not None:
            latent_h, latent_w = 1, slot
        sizes = {"latent_h": latent_h, "latent_w": latent_w, "tokens": tokens}
        return self["unet_deep"].spec.shared_axes(sizes)


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def allocate(
    spec: TensorSpec, axes: Mapping[str, int], device: torch.device | str = "cpu"
) -> Tensor:
    return torch.empty(spec.shape(axes), dtype=torch_dtype(spec), device=device)


def check_inputs(spec: ModelSpec, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Check a call's inputs against the spec and return its free axes."""
    for tensor in spec.inputs:
        given = inputs.get(tensor.name)
        if given is not None and given.dtype != torch_dtype(tensor):
            raise ShapeError(
                f"{spec.name}: input {tensor.name!r} is {given.dtype}, expected {tensor.dtype}"
            )
    return spec.axes({name: tuple(value.shape) for name, value in inputs.items()})


def call(engine: Engine, arch: Architecture, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run an engine and return new output tensors."""
    axes = check_inputs(engine.spec, inputs)
    if "latent_h" in axes:
        axes |= image_axes(arch, axes["latent_h"], axes["latent_w"])
        axes |= level_axes(axes["latent_h"], axes["latent_w"])
    elif "image_h" in axes:
        axes |= latent_axes(arch, axes["image_h"], axes["image_w"])
    device = next(iter(inputs.values())).device
    outputs = {t.name: allocate(t, axes, device) for t in engine.spec.outputs}
    engine(inputs, outputs)
    return outputs


def to_host(tensor: Tensor, engines: Engines) -> Tensor:
    """Copy a tensor to the host without waiting; the reader must wait for a fence. The memory is
    pinned: otherwise the copy would wait and take three times as long."""
    if engines.device.type == "cpu":
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
