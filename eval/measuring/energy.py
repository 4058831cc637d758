"""What the GPUs have used since their driver started, in joules, where NVML is there to say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def meter() -> Callable[[], float] | None:
    """Reads the counters of all GPUs of this machine; None where one of them does not count, as a
    part of the energy would be taken for all of it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        found = range(pynvml.nvmlDeviceGetCount())
        handles: list[Any] = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in found]
        for handle in handles:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    if not handles:
        return None
    return lambda: sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1000
