"""The measured time of a profiled tick by group, from a trace of PyTorch's profiler; without a GPU.

Each kernel is matched with the work that kernel_work.py records. Our kernels start in the recorded
order, and so do a library's products, its convolutions and its attentions, each kind separately.
Every other kernel is a pass over memory.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.speed.estimated_time import GAPS, SIDE, USUAL_ROWS
from eval.speed.kernel_work import MEMORY, KernelWork, named_work_of
from eval.speed.meta_networks import inputs_of, unets

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""a GPU's categories in a trace"""
LIBRARY = {
    "attention": r"sdpa|flash|fmha",
    "convolution": r"fprop|convolve|conv2d",
    "product": r"nvjet|gemm|cutlass",
}
"""patterns of library kernels' names; the first match counts"""


class TraceMismatch(ValueError):
    """The kernels of the trace differ from the recorded ones."""


@dataclass(frozen=True)
class TracedKernel:
    name: str
    start_us: float
    took_us: float


def read_trace(trace: Path) -> list[TracedKernel]:
    """The kernels of a trace, in order."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    ran = [TracedKernel(e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") in DEVICE]
    return sorted(ran, key=lambda ran: ran.start_us)


def milliseconds(
    trace: Path, precision: str, network: str, rows: int = USUAL_ROWS
) -> dict[str, float]:
    """Milliseconds of a tick of one network by group, with the gaps between kernels."""
    ran = read_trace(trace)
    module, inputs = unets(precision)[network], inputs_of(network, rows, SIDE)
    recorded = list(named_work_of(module, lambda: module(*inputs)))
    ours = [(name, work) for name, work in recorded if work.is_ours]
    names = {name for name, _ in ours}
    by_group: dict[str, float] = defaultdict(float)
    started = [each for each in ran if each.name in names]
    ticks = count_ticks(len(ours), started)
    for each, (name, work) in zip(started, ours * ticks, strict=True):
        if each.name != name:
            raise TraceMismatch(f"{each.name} ran where {name} was recorded")
        by_group[work.group] += each.took_us
    others = [each for each in ran if each.name not in names]
    for group, took_us in match_libraries(others, [work for _, work in recorded], ticks):
        by_group[group] += took_us
    total_us = ran[-1].start_us + ran[-1].took_us - ran[0].start_us
    by_group[GAPS] = total_us - sum(by_group.values())
    by_group["sum"] = total_us
    return {group: us / 1000 / ticks for group, us in by_group.items()}


def match_libraries(
    others: Sequence[TracedKernel], works: Sequence[KernelWork], ticks: int
) -> Iterator[tuple[str, float]]:
    by_unit: dict[str, list[TracedKernel]] = defaultdict(list)
    for each in others:
        by_unit[unit_of(each.name)].append(each)
    for unit, kernels in by_unit.items():
        expected = [work.group for work in works if work.unit == unit and not work.is_ours]
        expected = [MEMORY] if unit == "memory" else expected
        if len(set(expected)) == 1:
            # A library may start several kernels for one convolution.
            yield from ((expected[0], each.took_us) for each in kernels)
        elif count_ticks(len(expected), kernels) == ticks:
            groups = expected * ticks
            yield from ((g, e.took_us) for g, e in zip(groups, kernels, strict=True))


def unit_of(name: str) -> str:
    return next((unit for unit, names in LIBRARY.items() if re.search(names, name)), "memory")


def count_ticks(count: int, kernels: Sequence[TracedKernel]) -> int:
    """The number of ticks with `count` kernels each."""
    ticks, left = divmod(len(kernels), count)
    if left or not ticks:
        raise TraceMismatch(f"{len(kernels)} kernels where {count} a tick were recorded")
    return ticks
