"""A trace's kernels find their groups by the order in which they are noted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from eval.h200.kernels import LIBRARY, TraceMismatch, milliseconds
from eval.speed import meta_networks
from eval.speed.estimated_time import GAPS
from eval.speed.kernel_work import KernelWork, named_work_of

KERNEL_OF = {
    "product": "nvjet_hsh",
    "convolution": "xmma_fprop",
    "attention": "sdpa",
    "memory": "add",
}
TICKS = 2


@pytest.fixture(scope="module")
def noted() -> list[tuple[str, KernelWork]]:
    module = meta_networks.unets("int8")["unet_shallow"]
    inputs = meta_networks.inputs_of("unet_shallow", 16, 1024)
    return list(named_work_of(module, lambda: module(*inputs)))


def write(path: Path, names: list[str]) -> Path:
    """Each kernel takes 3 µs, and 1 µs lies between two."""
    events = [
        {"cat": "kernel", "name": name, "ts": 4.0 * i, "dur": 3.0} for i, name in enumerate(names)
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"cat": "cpu_op", "name": "aten::mm"}, *events]}, file)
    return path


def test_each_kernel_counts_in_its_group(
    noted: list[tuple[str, KernelWork]], tmp_path: Path
) -> None:
    names = [name or KERNEL_OF[work.unit] for name, work in noted]
    trace = write(tmp_path / "trace.json.gz", names * TICKS)
    found = milliseconds(trace, "int8", "unet_shallow")
    for group in {work.group for _, work in noted}:
        count = sum(work.group == group for _, work in noted)
        assert found.pop(group) == pytest.approx(0.003 * count), group
    assert found.pop("sum") == pytest.approx(0.004 * len(noted), rel=0.01)
    assert found == {GAPS: pytest.approx(0.001 * len(noted), rel=0.01)}


def test_other_kernels_than_were_noted_are_refused(
    noted: list[tuple[str, KernelWork]], tmp_path: Path
) -> None:
    ours = [name for name, work in noted if work.is_ours]
    trace = write(tmp_path / "trace.json.gz", ours[1:])
    with pytest.raises(TraceMismatch, match=f"{len(ours) - 1} kernels where {len(ours)} a tick"):
        milliseconds(trace, "int8", "unet_shallow")
    assert set(LIBRARY) | {"memory"} == set(KERNEL_OF)
