"""The GPU of this machine, if it has one. It is the one place that asks CUDA for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engines.targets import Target, target_of


def local_target() -> Target | None:
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return target_of(found.name, (found.major, found.minor), found.total_memory)


def cuda_fence() -> Callable[[], None]:
    """Marks what was enqueued so far; calling the result waits until it is computed."""
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
