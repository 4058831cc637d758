"""What a GPU has used since its driver started, in joules, where NVML is there to say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def meter() -> Callable[[], float] | None:
    """Reads the first GPU's counter; None where there is none that counts."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
