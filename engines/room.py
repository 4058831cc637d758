"""Checks whether a model's weights fit into the free memory of this machine's device."""

from __future__ import annotations

from pathlib import Path

from sdxl.checkpoint import Checkpoint
from sdxl.checkpoint_checks import count_numbers

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}
MEMINFO, AVAILABLE = Path("/proc/meminfo"), "MemAvailable:"
GROUP = Path("/sys/fs/cgroup")
"""a container's memory limit and use; other systems lack these files"""


class NoMemory(RuntimeError):
    """The weights do not fit."""


def check_room(checkpoint: Checkpoint, precision: str) -> None:
    """Raise NoMemory unless the weights fit. An empty precision means the device's default."""
    import torch

    is_gpu = torch.cuda.is_available()
    bytes_each = BYTES[precision or ("fp16" if is_gpu else "fp32")]
    files = [file for part in checkpoint.parts for file in checkpoint.weight_files(part)]
    needed = bytes_each * sum(map(count_numbers, files))
    free = torch.cuda.mem_get_info()[0] if is_gpu else free_bytes()
    if needed > free:
        raise NoMemory(f"{checkpoint.name} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free")


def free_bytes() -> int:
    """Return the free main memory, within this container's limit."""
    lines = MEMINFO.read_text().splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith(AVAILABLE)]
    limit, used = (GROUP / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and (most := limit.read_text().strip()) != "max":
        free.append(int(most) - int(used.read_text()))
    return min(free)
