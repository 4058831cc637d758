"""A simulated GPU, as NVIDIA's management library describes it."""

from __future__ import annotations

from types import SimpleNamespace


class OneGpu:
    """The functions of the management library that the service calls."""

    NVMLError = RuntimeError

    @staticmethod
    def nvmlDeviceGetMemoryInfo(device: object) -> SimpleNamespace:
        return SimpleNamespace(used=7 << 30)

    @staticmethod
    def nvmlDeviceGetTotalEnergyConsumption(device: object) -> int:
        return 1500
