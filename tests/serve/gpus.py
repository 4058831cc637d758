"""A GPU that is not there, as NVIDIA's management library would tell of it."""

from __future__ import annotations

from types import SimpleNamespace


class OneGpu:
    """As much of the management library as is asked of it."""

    NVMLError = RuntimeError

    @staticmethod
    def nvmlDeviceGetMemoryInfo(device: object) -> SimpleNamespace:
        return SimpleNamespace(used=7 << 30)

    @staticmethod
    def nvmlDeviceGetTotalEnergyConsumption(device: object) -> int:
        return 1500
