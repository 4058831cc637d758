"""The one way our kernels are started: on their tensor's GPU, or only written down.

Whoever wants to know what a network would start (how much it computes, which variants must compile)
runs it on the meta device within `noted`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""what a launch says to the compiler, beside the kernel's own constants"""


@dataclass(frozen=True)
class Launch:
    """A kernel with what it is given, in the order and under the names of its parameters."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def tensors(self) -> list[Tensor]:
        """Those of descriptors too."""
        bases = (getattr(argument, "base", argument) for argument in self.arguments)
        return [base for base in bases if isinstance(base, Tensor)]


_notes: ContextVar[list[Launch] | None] = ContextVar("notes", default=None)


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """Within it, launches on the meta device are kept in the list and nothing runs."""
    launches: list[Launch] = []
    token = _notes.set(launches)
    try:
        yield launches
    finally:
        _notes.reset(token)


def is_noted() -> bool:
    return _notes.get() is not None


def launch(
    kernel: Any, grid: tuple[int, ...], x: Tensor, *arguments: Any, **constants: Any
) -> None:
    """`x` is the kernel's first argument, and says where it runs."""
    notes = _notes.get()
    if notes is not None and x.is_meta:
        notes.append(Launch(kernel, grid, (x, *arguments), constants))
        return
    # Triton takes the thread's current device, whatever the tensors are on.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        # Said, because Triton is about to change what it does unless told.
        kernel[grid](x, *arguments, enable_fp_fusion=True, **constants)
