"""The energy of all GPUs; none if a GPU does not count."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from eval.measuring.energy import open_meter


class Refused(Exception):
    pass


def nvml(millijoules: Sequence[int | None]) -> ModuleType:
    """A stand-in for a driver with one GPU per figure. None: its GPU does not count energy."""
    module = ModuleType("pynvml")

    def read(index: int) -> int:
        value = millijoules[index]
        if value is None:
            raise Refused
        return value

    functions = {
        "NVMLError": Refused,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(millijoules),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetTotalEnergyConsumption": read,
    }
    vars(module).update(functions)
    return module


@pytest.mark.parametrize(
    ("millijoules", "joules"),
    [([2000], 2.0), ([1000, 2500, 500], 4.0), ([1000, None], None), ([], None)],
)
def test_the_energy_of_all_gpus_is_added(
    millijoules: list[int | None], joules: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(millijoules))
    read = open_meter()
    assert (read() if read else None) == joules


def test_without_nvml_there_is_no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_meter() is None
