"""The joules that this machine's GPUs used since their driver started, by NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def open_meter() -> Callable[[], float] | None:
    """Return a function that reads the sum over all GPUs; None if a GPU does not count joules."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        indices = range(pynvml.nvmlDeviceGetCount())
        handles: list[Any] = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in indices]
        for handle in handles:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    if not handles:
        return None
    return lambda: sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1000
