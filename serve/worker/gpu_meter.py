"""GPU memory and energy for Prometheus, from NVIDIA's management library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class GpuMeter(Collector):
    """Meters the GPUs of this process, with the label `work`. Reports nothing without pynvml or a
    driver."""

    def __init__(self, registry: CollectorRegistry, work: str) -> None:
        self.work = work
        self._devices = dict(_devices())
        registry.register(self)

    def collect(self) -> Iterator[Any]:
        if not self._devices:
            return
        import pynvml

        labels = ["gpu", "work"]
        memory = GaugeMetricFamily("sdxl_gpu_memory_bytes", "used", labels=labels)
        energy = CounterMetricFamily("sdxl_gpu_energy_joules", "since the driver", labels=labels)
        for name, device in self._devices.items():
            with suppress(pynvml.NVMLError):
                memory.add_metric([name, self.work], pynvml.nvmlDeviceGetMemoryInfo(device).used)
                joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000
                energy.add_metric([name, self.work], joules)
        yield from (memory, energy)


def _devices() -> Iterator[tuple[str, Any]]:
    if find_spec("pynvml") is None:
        return
    import pynvml

    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            names = [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
        else:
            names = [name for name in visible.split(",") if name]
        for name in names:
            if name.isdigit():
                yield name, pynvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                yield name, pynvml.nvmlDeviceGetHandleByUUID(name.encode())
    except pynvml.NVMLError:
        return
