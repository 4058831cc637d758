"""The kernels of a trace are matched with their groups in order."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from eval.gpu.kernels import LIBRARY, TraceMismatch, milliseconds
from eval.speed import meta_networks
from eval.speed.estimated_time import GAPS
from eval.speed.kernel_work import KernelWork, named_work_of

KERNEL_OF = {"product": "nvjet", "convolution": "fprop", "attention": "sdpa", "memory": "add"}
TICKS = 2


@pytest.fixture(scope="module")
def recorded() -> list[tuple[str, KernelWork]]:
    module = meta_networks.unets("int8")["unet_shallow"]
    inputs = meta_networks.inputs_of("unet_shallow", 16, 1024)
    return list(named_work_of(module, lambda: module(*inputs)))


def write(folder: Path, names: list[str]) -> Path:
    """Write a trace with kernels of 3 µs and gaps of 1 µs."""
    path = folder / "trace.json.gz"
    events = [
        {"cat": "kernel", "name": name, "ts": 4.0 * i, "dur": 3.0} for i, name in enumerate(names)
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"cat": "cpu_op", "name": "aten::mm"}, *events]}, file)
    return path


def test_each_kernel_counts_in_its_group(
    recorded: list[tuple[str, KernelWork]], tmp_path: Path
) -> None:
    names = [name or KERNEL_OF[work.unit] for name, work in recorded]
    trace = write(tmp_path, names * TICKS)
    by_group = milliseconds(trace, "int8", "unet_shallow")
    for group in {work.group for _, work in recorded}:
        count = sum(work.group == group for _, work in recorded)
        assert by_group.pop(group) == pytest.approx(0.003 * count), group
    assert by_group.pop("sum") == pytest.approx(0.004 * len(recorded), rel=0.01)
    assert by_group == {GAPS: pytest.approx(0.001 * len(recorded), rel=0.01)}


def test_other_kernels_than_recorded_are_refused(
    recorded: list[tuple[str, KernelWork]], tmp_path: Path
) -> None:
    ours = [name for name, work in recorded if work.is_ours]
    trace = write(tmp_path, ours[1:])
    with pytest.raises(TraceMismatch, match=f"{len(ours) - 1} kernels where {len(ours)} a tick"):
        milliseconds(trace, "int8", "unet_shallow")
    assert set(LIBRARY) | {"memory"} == set(KERNEL_OF)
