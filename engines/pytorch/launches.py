"""Starts Triton kernels on their tensor's GPU, or records their launches.

`noted` records the launches of a network on the meta device. They show how much it computes, and
which variants must be compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sdxl.engine import torch_dtype
from sdxl.specs import ModelSpec

INTERPRETED = "TRITON_INTERPRET"
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
FUSION = {"enable_fp_fusion": True}
"""Stated because Triton's default will change."""


@dataclass(frozen=True)
class Rounding:
    """How a kernel rounds its result for the layer that reads it. Without `number` it does not."""

    steps: Tensor | None = None
    """An input times these, of its channel, is in steps of the 8-bit number."""
    number: torch.dtype | None = None
    flags: Tensor | None = None
    """one for each row; becomes NaN if a value for int8, which has no NaN, is NaN"""
    is_bordered: bool = False
    """The result is the bordered map that triton_tma_product.py reads."""


UNROUNDED = Rounding()


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments in the order of its parameters, and constants by parameter name. An
    argument that is None is left out: the kernel is compiled without it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def by_name(self) -> dict[str, Any]:
        """The arguments by parameter."""
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False))

    @property
    def tensors(self) -> list[Tensor]:
        """The arguments' tensors, including those of descriptors."""
        bases = (getattr(argument, "base", argument) for argument in self.arguments)
        return [base for base in bases if isinstance(base, Tensor)]


_notes: ContextVar[list[Launch] | None] = ContextVar("notes", default=None)
_capability: ContextVar[tuple[int, int]] = ContextVar("capability", default=(9, 0))


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Record launches on the meta device in the list. Nothing runs."""
    launches: list[Launch] = []
    token = _notes.set(launches)
    try:
        yield launches
    finally:
        _notes.reset(token)


@contextmanager
def like_a_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Let the meta device stand for a GPU of this compute capability."""
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or of the GPU that the meta device stands for. A CPU
    has (0, 0)."""
    return _capability.get() if device.type == "meta" else _real_capability(device)


@cache
def _real_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def meta_inputs(spec: ModelSpec, axes: Mapping[str, int]) -> list[Tensor]:
    """Return a call's inputs on the meta device. Maps are channels-last, as in the loop."""
    inputs = [torch.empty(t.shape(axes), dtype=torch_dtype(t), device="meta") for t in spec.inputs]
    return [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in inputs]


def has_kernels(x: Tensor) -> bool:
    """Return whether Triton kernels run on x: on a GPU, and on a CPU in Triton's interpreter."""
    if x.is_meta:
        return _notes.get() is not None
    return x.is_cuda or os.environ.get(INTERPRETED) == "1"


def triton_module(name: str) -> Any:
    """Import one of the Triton modules here. Imported late: without a GPU, Triton may be
    missing."""
    return import_module(f"engines.pytorch.triton_{name}")


def launch(
    kernel: Any, grid: tuple[int, ...], x: Tensor, *arguments: Any, **constants: Any
) -> None:
    """Start a kernel on the device of `x`, its first argument."""
    notes = _notes.get()
    if notes is not None and x.is_meta:
        notes.append(Launch(kernel, grid, (x, *arguments), constants))
        return
    # Triton uses the thread's current device, not the tensors' device.
    is_elsewhere = x.is_cuda and x.get_device() != torch.cuda.current_device()
    with torch.cuda.device(x.device) if is_elsewhere else nullcontext():
        kernel[grid](x, *arguments, **FUSION, **constants)
