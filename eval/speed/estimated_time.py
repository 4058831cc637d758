"""`sdxl bench floor --gpu NAME`: the estimated time of a tick and of a picture on another GPU, from
the work in kernel_work.py and measured rates.

    time of a kernel = the longer of  flops × (1 + fill / depth) / rate  and  bytes / bandwidth,
                       plus its operations after the sums

A gap follows each kernel. `fill` is the cost of a tile before and after its sums, in units of their
depth. Products and attention among pixels were measured alone on an H200, convolutions and
attention to a prompt in a call (docs/gpus).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import torch

from engines.low_rank import adapted, bank_of
from eval.measuring.markdown import table_lines
from eval.speed.kernel_work import KernelWork, Unit, work_of
from eval.speed.meta_networks import (
    CONTROL,
    PRECISIONS,
    UNETS,
    bank,
    control_net,
    decoder,
    inputs_of,
    latents_of,
    unets,
)
from sdxl.networks.control import control_networks
from sdxl.params import GenerationParams
from sdxl.specs import PAGE_RANK, VARIANTS

TERA = 1e12
SIDE = 1024
"""of the estimated pictures, in pixels"""
USUAL_ROWS = 16
"""rows of the call in the table of groups"""
DEEP, _ = UNETS
LORA_RANK = 32
GAPS = "gaps"
TILE = 128
"""rows and columns of a product's tiles, to estimate whether they fill the GPU"""


@dataclass(frozen=True)
class KernelRate:
    """TFLOP/s of an H200 in infinitely deep sums, and the extra cost of a tile."""

    teraflops: float
    fill: float
    source: str


@dataclass(frozen=True)
class EstimatedGpu:
    """`share` of an H200's arithmetic; `bandwidth`: bytes/s read and written by a copy."""

    name: str
    share: float
    bandwidth: float
    multiprocessors: int
    source: str


COPIED = 4.3e12
GPUS = {
    "h200": EstimatedGpu("H200", 1, COPIED, 132, "a copy by PyTorch 2.11 on an H200: 4.3 TB/s"),
    "h100": EstimatedGpu(
        "H100", 1, COPIED * 3.35 / 4.8, 132, "data sheets: 3.35 TB/s to the H200's 4.8"
    ),
    "l40s": EstimatedGpu(
        "L40S", 366 / 989, COPIED * 0.864 / 4.8, 142, "data sheets: 366 TFLOP/s, 864 GB/s"
    ),
}
GAP_S = 2e-6
"""the gap between two kernels of a CUDA graph. NVIDIA ('Getting Started with CUDA Graphs', 2019)
measured 0.5 µs beyond the kernel's own time on a V100; kernels also need time to start and to run
out."""
OTHER_S = 0.010
"""a picture's text encoding, joins and copies: assumed"""
RATES: dict[tuple[Unit, bool, int], KernelRate] = {
    ("product", False, 16): KernelRate(
        826, 400, "PyTorch 2.11 on an H200, 8192³ of random bfloat16: 788 TFLOP/s"
    ),
    ("product", True, 16): KernelRate(
        400, 400, "assumed: half of PyTorch's; ranks of LoRAs have few columns"
    ),
    ("product", False, 8): KernelRate(
        1418, 341, "PyTorch 2.11 on an H200, FP8: 1120 at a depth of 1280, 1330 at 5120"
    ),
    ("product", True, 8): KernelRate(
        1370, 279, "an H200, FP8: 1121 with query, key and value at a depth of 1280"
    ),
    ("convolution", False, 16): KernelRate(690, 200, "37.2 ms of a call of 16 rows on an H200"),
    ("convolution", True, 8): KernelRate(1210, 800, "22.9 ms of a call of 16 rows on an H200"),
}
ATTENTION = {
    16: {4096: 444.0, 1024: 437.0, 0: 123.0},
    8: {4096: 533.0, 1024: 457.0, 0: 300.0},
}
"""TFLOP/s with heads of 64, by bits and by the smallest number of tokens"""
ATTENTION_SOURCE = (
    "an H200 with heads of 64, 4096 and 1024 tokens: in 16 bits cuDNN's 444 and 437 TFLOP/s, to a "
    "prompt 123; in FP8, ours, 533 and 457"
)
LANES, CLOCK = 128, 1.7e9
OPERATIONS_SOURCE = (
    "what GEGLU adds to the end of its product, bare: 8 instructions a value in FP8, 13 in int8, "
    "counted in the code compiled for sm_90; 128 a clock and multiprocessor (CUDA C++ Programming "
    "Guide, throughput of native arithmetic instructions; 16 of ex2.approx, as FlashAttention-3's "
    "paper has it) at 1.7 GHz, assumed"
)
WIDE_HEAD, WIDE_ATTENTION = 256, 100.0
"""the largest head of a fused Hopper kernel, and the assumed rate of larger heads"""


def seconds_of(work: KernelWork, gpu: EstimatedGpu) -> float:
    moving = work.bytes / gpu.bandwidth
    if not work.flops:
        return moving
    after_s = work.operations / (LANES * gpu.multiprocessors * CLOCK)
    return max(moving, work.flops / (flops_per_second(work, gpu) * gpu.share)) + after_s


def flops_per_second(work: KernelWork, gpu: EstimatedGpu) -> float:
    if work.unit == "attention":
        rates = (rate for least, rate in ATTENTION[work.bits].items() if work.tokens >= least)
        return TERA * (next(rates) if work.head <= WIDE_HEAD else WIDE_ATTENTION)
    rate = RATES[work.unit, work.is_ours, work.bits]
    rows, columns = work.results
    tiles = ceil(rows / TILE) * ceil(columns / TILE)
    filled = min(1.0, tiles / gpu.multiprocessors)
    return TERA * rate.teraflops * filled / (1 + rate.fill / work.depth)


def seconds_by_group(works: Iterable[KernelWork], gpu: EstimatedGpu) -> dict[str, float]:
    """Seconds by group; the gaps are the last group."""
    seconds: dict[str, float] = defaultdict(float)
    gaps_s = 0.0
    for work in works:
        seconds[work.group] += seconds_of(work, gpu)
        gaps_s += GAP_S
    return {**dict(sorted(seconds.items())), GAPS: gaps_s}


def call_s(works: Iterable[KernelWork], gpu: EstimatedGpu) -> float:
    return sum(seconds_by_group(works, gpu).values())


@cache
def works_of(network: str, precision: str, rows: int) -> tuple[KernelWork, ...]:
    module, inputs = unets(precision)[network], inputs_of(network, rows, SIDE)
    return work_of(module, lambda: module(*inputs))


@cache
def works_with_loras(precision: str, rows: int) -> tuple[KernelWork, ...]:
    """The work of a deep call whose rows have LoRAs of the transformers, of rank LORA_RANK."""
    module, inputs = unets(precision)[DEEP], inputs_of(DEEP, rows, SIDE)
    pages, scales = torch.zeros(2, rows, LORA_RANK // PAGE_RANK, device="meta")
    adapters = bank_of(VARIANTS["lora"][DEEP], module, bank())

    def call() -> None:
        with adapted(adapters, pages.long(), scales):
            module(*inputs)

    return work_of(module, call)


@cache
def works_of_a_net(precision: str, rows: int) -> tuple[KernelWork, ...]:
    """The work of a ControlNet's call."""
    net, inputs = control_net(precision), inputs_of(CONTROL, rows, SIDE)
    module = control_networks(net)[CONTROL]
    return work_of(module, lambda: module(*inputs))


def additions(gpu: EstimatedGpu, precision: str, rows: int) -> dict[str, float]:
    """The time of a picture with LoRAs or a ControlNet, divided by a plain picture's."""
    deep_s, shallow_s = (call_s(works_of(name, precision, rows), gpu) for name in UNETS)
    decoding_s = (rows // 2) * (call_s(works_of_a_picture(precision), gpu) + OTHER_S)
    loras_s = call_s(works_with_loras(precision, rows), gpu) - deep_s
    net_s = call_s(works_of_a_net(precision, rows), gpu)
    steps, ratios = GenerationParams().steps, {}
    for interval in (1, 2):
        count = ceil(steps / interval)
        plain_s = count * deep_s + (steps - count) * shallow_s + decoding_s
        for name, added_s in (("LoRAs", loras_s), ("a ControlNet", net_s)):
            ratios[f"{precision}, {name}, interval {interval}"] = 1 + count * added_s / plain_s
    return ratios


@cache
def works_of_a_picture(precision: str) -> tuple[KernelWork, ...]:
    """The work of decoding one picture."""
    module, latents = decoder(precision), latents_of(1, SIDE // 8)
    return work_of(module, lambda: module(latents))


def images_per_second(
    gpu: EstimatedGpu, precision: str, rows: int, deep: int, shallow: int
) -> float:
    """The rate of guided pictures with these steps, with `rows` rows always in flight."""
    deep_s, shallow_s = (call_s(works_of(name, precision, rows), gpu) for name in UNETS)
    decoding_s = call_s(works_of_a_picture(precision), gpu)
    return 1 / ((deep * deep_s + shallow * shallow_s) / (rows // 2) + decoding_s + OTHER_S)


def report(
    name: str, rows: Sequence[int], precisions: Sequence[str] = PRECISIONS
) -> dict[str, Any]:
    gpu, steps = GPUS[name], GenerationParams().steps
    grouped = USUAL_ROWS if USUAL_ROWS in rows else max(rows)
    works = {
        f"{precision} {network}": works_of(network, precision, grouped)
        for network in UNETS
        for precision in precisions
    }
    works |= {f"{precision} decoding": works_of_a_picture(precision) for precision in precisions}
    return {
        "gpu": gpu.name,
        "rows": grouped,
        "groups": {each: milliseconds(kernels, gpu) for each, kernels in works.items()},
        "assumed": [
            gpu.source,
            *(
                f"{unit} in {bits} bits, {'ours' if is_ours else 'a library'}: {rate.teraflops} "
                f"TFLOP/s in infinitely deep sums; {rate.source}"
                for (unit, is_ours, bits), rate in RATES.items()
            ),
            f"attention: {ATTENTION_SOURCE}",
            OPERATIONS_SOURCE,
        ],
        "additions": {
            name: ratio
            for precision in precisions
            for name, ratio in additions(gpu, precision, grouped).items()
        },
        "images_per_second": {
            f"{precision}, {'DeepCache' if interval > 1 else 'full'}": {
                str(count): images_per_second(gpu, precision, count, deep, steps - deep)
                for count in rows
            }
            for precision in precisions
            for interval in (1, 2)
            for deep in [ceil(steps / interval)]
        },
    }


def milliseconds(works: Iterable[KernelWork], gpu: EstimatedGpu) -> dict[str, float]:
    each = {group: 1000 * s for group, s in seconds_by_group(works, gpu).items()}
    return {**each, "sum": sum(each.values())}


def table(report: Mapping[str, Any]) -> Iterator[str]:
    """The report as Markdown."""
    groups = report["groups"]
    names = dict.fromkeys(group for each in groups.values() for group in each if group != "sum")
    head = f"{report['gpu']}, {report['rows']} rows, ms a call"
    rows = [[n, *(f"{each.get(n, 0):.1f}" for each in groups.values())] for n in (*names, "sum")]
    yield from table_lines([head, *groups], rows)
    rates = report["images_per_second"]
    counts = list(next(iter(rates.values())))
    rows = [[name, *(f"{each[n]:.2f}" for n in counts)] for name, each in rates.items()]
    yield from ("", *table_lines(["images/s", *(f"{n} rows" for n in counts)], rows))
    rows = [[name, f"{ratio:.2f}"] for name, ratio in report["additions"].items()]
    head = f"{report['rows']} rows, LoRAs of rank {LORA_RANK}"
    yield from ("", *table_lines([head, "time over a plain picture's"], rows))
    yield from ("", *(f"- {line}" for line in report["assumed"]))
