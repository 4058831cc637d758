"""The table of GPUs that engines are built for. It imports nothing that needs a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sdxl.params import InvalidParams

Capability = tuple[int, int]
"""CUDA compute capability, major and minor"""

LOCAL = "local"


@dataclass(frozen=True)
class Target:
    """One kind of GPU."""

    name: str
    """NVIDIA's name of the card, and Ray's accelerator_type"""
    capability: Capability
    memory_gib: int
    max_batch: int
    """images in one UNet call, two rows each, that the memory holds at SDXL's 1024×1024"""
    precision: str
    """the default precision"""

    @property
    def key(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def sm(self) -> str:
        """The architecture's short name in compilers and tensorrt-rtx."""
        major, minor = self.capability
        return f"SM{major}{minor}"


TARGETS = {
    target.key: target
    for target in (
        Target("H100", (9, 0), 80, 8, "int8"),
        Target("H200", (9, 0), 141, 16, "int8"),
        Target("GH200", (9, 0), 96, 8, "int8"),
        Target("L40S", (8, 9), 48, 4, "int8"),
        Target("B200", (10, 0), 180, 16, "fp8"),
    )
}

GIB_PER_IMAGE = 8
"""memory for each image in a call, on a GPU that is not in the table"""


def named_target(name: str) -> Target:
    if name.lower() not in TARGETS:
        raise InvalidParams.unknown("gpu", name, (*TARGETS, LOCAL))
    return TARGETS[name.lower()]


def target_of(device_name: str, capability: Capability, memory_bytes: int) -> Target:
    """Return the table's row for CUDA's name of a device, such as "NVIDIA H100 80GB HBM3". For
    other devices and MIG slices, make a row from the device's properties."""
    words = re.findall(r"\w+", device_name.upper())
    for target in TARGETS.values():
        if target.name in words and "MIG" not in words:
            return target
    memory_gib = memory_bytes >> 30
    name = device_name.removeprefix("NVIDIA ").strip()
    return Target(name, capability, memory_gib, max(1, memory_gib // GIB_PER_IMAGE), "fp16")
