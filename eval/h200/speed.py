"""How fast: against peers, by stage, kernel and setting, and under arrivals. Each function yields
a name and a figure at a time.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.cuda.recordings import Ticks
from engines.pytorch.eight_bit import EightBit, has_scaled_mm
from engines.pytorch.kernel_switch import has_kernels, kernels, products
from eval.h200.bench import BATCH, Bench
from eval.measuring.arithmetic import Shapes, configs_of, work_of
from eval.measuring.ceilings import fastest, measure_ceilings
from eval.measuring.timing import Run
from eval.speed import batching as arrivals
from eval.speed.floor import calls_of, reached
from eval.speed.peers import figures, prompts_for
from eval.speed.variants import (
    CACHED,
    COMPILED,
    COMPILED_CACHED,
    EAGER,
    INTERVALS,
    name_of,
    paint_with,
)
from sdxl.pipeline import Pipeline

Found = Iterator[tuple[str, Any]]
ROUNDS = 3
OPTIONS = (
    "no-graphs",
    "no-rearranged,no-graphs",
    "attention=cudnn",
    "attention=flash",
    "attention=efficient",
    "compile",
)
FP8_OPTIONS = ("", "attention=cudnn", "no-fp8_decoder")
"""what FP8 in attention and in the decoder brings"""
CONVOLUTIONS = (
    (320, 320, 128),
    (640, 640, 64),
    (1280, 1280, 32),
    (2560, 1280, 32),
    (960, 320, 128),
)
LINEARS = ((640, 1920, 64), (640, 5120, 64), (2560, 640, 64), (1280, 3840, 32), (1280, 10240, 32))
"""channels in and out, and the side of the map, at 1024×1024"""


def peers(bench: Bench) -> Found:
    yield from _compared(bench, BATCH, (EAGER, CACHED), bench.precisions)


def peers_compiled(bench: Bench) -> Found:
    """Apart from the others: compiling may take longer than there is."""
    names = () if bench.is_dry else (COMPILED, COMPILED_CACHED)
    yield from _compared(bench, BATCH, (EAGER, *names), bench.precisions[:2])


def peers_1(bench: Bench) -> Found:
    yield from _compared(bench, 1, (EAGER, CACHED), bench.precisions)


def peers_16(bench: Bench) -> Found:
    yield from _compared(bench, 16, (EAGER, CACHED), bench.precisions[:2])


def _compared(bench: Bench, batch: int, names: Sequence[str], precisions: Sequence[str]) -> Found:
    """Ours first. What fails costs its own figures alone, and the first run of each is kept too: a
    kill before the rounds end loses only the spread."""
    batch = 1 if bench.is_dry else batch
    ours = [f"torch:{precision}" for precision in precisions]
    runs: dict[str, Run] = {}
    loaded: dict[str, Pipeline] = {}
    yield "batch", batch
    for each, precision in zip(ours, precisions, strict=True):
        try:
            pipeline = bench.pipeline(precision)
            bench.warm(pipeline, batch)
        except Exception as error:
            yield f"passed over, {each}", _told(error)
            continue
        loaded[precision] = pipeline
        for interval in INTERVALS:
            paint = paint_with(pipeline, bench.setting, interval)
            runs[name_of(each, interval)] = partial(paint, prompts_for(batch))
    bench.release()
    for name in names:
        try:
            runs[name] = partial(bench.peer(name), prompts_for(batch))
        except Exception as error:
            yield f"passed over, {name}", _told(error)
    for name, run in list(runs.items()):
        try:
            yield f"first run, {name}", _seconds(run)
        except Exception as error:
            yield f"failed, {name}", _told(error)
            del runs[name]
    yield "recordings", {name: _recordings(pipeline) for name, pipeline in loaded.items()}
    options = argparse.Namespace(rounds=ROUNDS, price_per_hour=None, ours=ours)
    part_s = time.perf_counter() + bench.left_s / 4
    yield "figures", figures(runs, batch, options, part_s, warmup=0)


def _recordings(pipeline: Pipeline) -> int:
    """How many ticks were recorded: those of a service are recorded once."""
    ticks = pipeline.engines.run_recorded
    return len(ticks.recordings) if isinstance(ticks, Ticks) else 0


def _told(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-2000:]


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def stages(bench: Bench) -> Found:
    """Each network's call, against the floor that this machine's ceilings set."""
    setting = bench.setting
    configs = configs_of(setting.model)
    ceilings = measure_ceilings(bench.device, setting.dtype)
    yield "ceilings", asdict(ceilings)
    for precision in bench.precisions:
        pipeline = bench.pipeline(precision)
        for rows in (2,) if bench.is_dry else (2 * BATCH, 2):
            bench.warm(pipeline, rows // 2)
            shapes = Shapes(setting.side or pipeline.sizes.default, rows)
            work = work_of(configs, shapes, precision)
            with torch.inference_mode():
                loaded = {precision: pipeline.engines}
                yield f"{precision}, {rows} rows", calls_of(shapes, work, ceilings, loaded)


def options(bench: Bench) -> Found:
    """The whole UNet's call under each setting; the usual one first."""
    setting = bench.setting
    cases = [(bench.precisions[0], line, line or "as it is") for line in ("", *OPTIONS)]
    cases += [("fp8", line, f"fp8, {line or 'as it is'}") for line in FP8_OPTIONS]
    for precision, line, name in cases:
        if bench.is_dry and line == "compile":
            continue
        pipeline = bench.pipeline(precision, options=line)
        shapes = Shapes(setting.side or pipeline.sizes.default, 2 if bench.is_dry else 2 * BATCH)
        with torch.inference_mode():
            deep = reached(pipeline.engines, "unet_deep", shapes, 0.0)["seconds"]
        picture = partial(pipeline.generate, [bench.usual])
        first, second, third = (_seconds(picture) for _ in range(3))
        found = {"unet_deep_s": deep, "picture_s": min(second, third), "first_picture_s": first}
        yield name, found


def kernels_of(bench: Bench, dtype: torch.dtype, rows: int) -> Found:
    scale = 40 if bench.is_dry else 1
    for kind, shapes in (("conv", CONVOLUTIONS), ("linear", LINEARS)):
        for sizes in shapes:
            inside, out, side = (max(8, size // scale // 8 * 8) for size in sizes)
            x = torch.randn(rows, inside, side, side, device=bench.device, dtype=dtype)
            x = x.to(memory_format=torch.channels_last)
            if kind == "linear":
                x = x.permute(0, 2, 3, 1).flatten(1, 2)
            found = {
                name: fastest(run, bench.device)
                for name, run in _products(x, out, kind == "conv").items()
            }
            yield f"{kind} {inside}→{out} at {side}×{side}, {rows} rows", found


def kernels_timed(bench: Bench) -> Found:
    dtype, rows = bench.setting.dtype, 2 if bench.is_dry else 2 * BATCH
    with torch.inference_mode():
        yield "scaled_mm", {str(t): has_scaled_mm(bench.device, t) for t in (dtype, torch.bfloat16)}
        yield from kernels_of(bench, dtype, rows)
        x = torch.randn(rows, 64, 16, 16, device=bench.device, dtype=dtype)
        if not bench.is_dry:
            x = torch.randn(rows, 320, 128, 128, device=bench.device, dtype=dtype)
        x = x.to(memory_format=torch.channels_last)
        yield "group norm and SiLU", {n: fastest(r, bench.device) for n, r in _norms(x).items()}


def _products(x: Tensor, out: int, is_conv: bool) -> dict[str, Callable[[], object]]:
    inside = x.shape[1] if is_conv else x.shape[-1]
    dims = (out, 3, 3, inside) if is_conv else (out, inside)
    weight = torch.randn(dims, device=x.device)
    if is_conv:
        filters = weight.permute(0, 3, 1, 2).to(x.dtype)
        found: dict[str, Callable[[], object]] = {
            "PyTorch's": lambda: F.conv2d(x, filters, padding=1)
        }
    else:
        matrix = weight.to(x.dtype)
        found = {"PyTorch's": lambda: F.linear(x, matrix)}
    for number in (torch.float8_e4m3fn, torch.int8):
        ones, zeros = torch.ones(out, device=x.device), torch.zeros(out, device=x.device)
        layer = EightBit(weight.to(number), ones, torch.ones(inside, device=x.device), zeros)
        stored = layer.stored(x)
        found[f"{number}, rounding"] = partial(layer.stored, x)
        found[f"{number}, product"] = partial(layer.product, stored, x.dtype)
        if has_kernels(x):
            found[f"{number}, our product"] = partial(
                products().product, stored, layer.weight, layer.scale, layer.bias, x.dtype
            )
    return found


def _norms(x: Tensor) -> dict[str, Callable[[], object]]:
    channels = x.shape[1]
    weight, bias = torch.ones(channels, device=x.device), torch.zeros(channels, device=x.device)
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    found: dict[str, Callable[[], object]] = {
        "PyTorch's": lambda: F.silu(F.group_norm(x, 32, weight, bias))
    }
    if has_kernels(x):
        found["ours"] = lambda: kernels().norm_act(x, weight, bias, 32, 1e-5, has_silu=True)
    return found


def batching(bench: Bench) -> Found:
    """Poisson arrivals, in simulated time with this GPU's measured ticks."""
    for precision in bench.precisions:
        device = arrivals.measure(bench.pipeline(precision))
        yield f"{precision}, costs", device.costs.as_dict()
        for mix_name, mix in arrivals.MIXES.items():
            capacity = device.capacity(mix)
            count = 100 if bench.is_dry else arrivals.IMAGES
            for load in arrivals.LOADS:
                coming = arrivals.arrivals_at(load * capacity, mix, count)
                found = {
                    name: _latencies(*each)
                    for name, each in arrivals.disciplines(device, coming).items()
                }
                yield f"{precision}, {mix_name}, {load:.0%} of {capacity:.3f} images/s", found


def _latencies(seconds: Sequence[float], best: str) -> dict[str, float | str]:
    settled = arrivals.settled(seconds)
    figures: dict[str, float | str] = {
        "mean_s": statistics.fmean(settled),
        "p99_s": arrivals.p99(seconds),
    }
    return figures | ({"best": best} if best else {})
