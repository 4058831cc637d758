"""The machine of a measurement: processor, memory, accelerators, software. No host name."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import sdxl

PACKAGES = ("diffusers", "mlcommons_loadgen", "numpy", "onnxruntime", "tensorrt", "transformers")


def describe_system() -> dict[str, Any]:
    import torch

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "sdxl": sdxl.__version__,
        "packages": {"torch": torch.__version__, **_versions()},
    }


def processor() -> str:
    """The processor's name, and its family and model if known: generations share a name."""
    facts: dict[str, str] = {}
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    name = facts.get("model name", platform.machine())
    if "cpu family" not in facts:
        return name
    return f"{name} (family {facts['cpu family']}, model {facts['model']})"


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
