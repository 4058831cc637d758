"""The GPUs that engines are built for, as data. Another one is one more row. It imports nothing
that needs a GPU.
"""

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
    """as NVIDIA prints it on the card, and as Ray's accelerator_type"""
    capability: Capability
    memory_gib: int
    max_batch: int
    """images in one UNet call, two rows each; what the memory holds at SDXL's 1024×1024"""
    precision: str
    """what is served unless asked otherwise"""

    @property
    def key(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def sm(self) -> str:
        """the architecture's short name, as compilers and tensorrt-rtx write it"""
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
"""For a GPU that is not in the table: memory that one more image in a call is given."""


def named_target(name: str) -> Target:
    if name.lower() not in TARGETS:
        allowed = ", ".join([*TARGETS, LOCAL])
        raise InvalidParams("gpu", name, f"needed one of {allowed}")
    return TARGETS[name.lower()]


def listed_target(sm: str, max_batch: int) -> Target:
    """A GPU of which nothing is known but its architecture: what a plan for it needs."""
    capability = int(sm[2:-1]), int(sm[-1])
    return Target(sm, capability, GIB_PER_IMAGE * max_batch, max_batch, "fp16")


def target_of(device_name: str, capability: Capability, memory_bytes: int) -> Target:
    """The table's row for a device as CUDA names it ("NVIDIA H100 80GB HBM3"), or one made up
    from what is known of it, as for a slice of one (MIG): that has a part of the memory."""
    words = re.findall(r"\w+", device_name.upper())
    for target in TARGETS.values():
        if target.name in words and "MIG" not in words:
            return target
    memory_gib = memory_bytes >> 30
    name = device_name.removeprefix("NVIDIA ").strip()
    return Target(name, capability, memory_gib, max(1, memory_gib // GIB_PER_IMAGE), "fp16")
