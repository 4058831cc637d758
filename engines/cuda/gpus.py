"""The GPU of this machine, if it has one. It is the one place that asks CUDA for it."""

from __future__ import annotations

import torch

from engines.folders.targets import Target, target_of


def local_target(device: torch.device | None = None) -> Target | None:
    """The current GPU unless one is named."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(numbered(device))
    return target_of(found.name, (found.major, found.minor), found.total_memory)


def numbered(device: torch.device | None = None) -> torch.device:
    """With the index that its tensors have: "cuda" is the current one."""
    if device is None or device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
