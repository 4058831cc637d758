"""Speed sections: peers, stages, options, and arrivals. Each function yields one named figure at a
time.
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

from engines.cuda.recordings import Ticks
from eval.h200.bench import BATCH, Bench
from eval.measuring.arithmetic import Shapes, configs_of, work_of
from eval.measuring.ceilings import measure_ceilings
from eval.measuring.timing import Run
from eval.speed import batching as arrivals
from eval.speed.floor import measure_stages, time_call
from eval.speed.peers import measure_turns, prompts_for
from eval.speed.variants import (
    CACHED,
    COMPILED,
    COMPILED_CACHED,
    EAGER,
    INTERVALS,
    paint,
    variant_name,
)
from sdxl.pipeline import Pipeline

Figures = Iterator[tuple[str, Any]]
ROUNDS = 3
OPTIONS = (
    *("no-graphs", "no-rearranged,no-graphs", "attention=cudnn", "attention=flash"),
    *("attention=efficient", "compile"),
)
FP8_OPTIONS = ("", "attention=cudnn", "no-fp8_decoder")
"""the effect of fp8 in attention and in the decoder"""


def peers(bench: Bench) -> Figures:
    yield from _compared(bench, BATCH, (EAGER, CACHED), bench.precisions)


def peers_compiled(bench: Bench) -> Figures:
    """A section of its own: compiling may exceed the time budget."""
    names = () if bench.is_dry else (COMPILED, COMPILED_CACHED)
    yield from _compared(bench, BATCH, (EAGER, *names), bench.precisions[:2])


def peers_1(bench: Bench) -> Figures:
    yield from _compared(bench, 1, (EAGER, CACHED), bench.precisions)


def peers_16(bench: Bench) -> Figures:
    yield from _compared(bench, 16, (EAGER, CACHED), bench.precisions[:2])


def _compared(bench: Bench, batch: int, names: Sequence[str], precisions: Sequence[str]) -> Figures:
    """Ours first. A failure costs only its own figures. The first run of each is recorded too, so a
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
            yield f"passed over, {each}", _traceback(error)
            continue
        loaded[precision] = pipeline
        for interval in INTERVALS:
            name = variant_name(each, interval)
            runs[name] = partial(paint, pipeline, bench.setting, interval, prompts_for(batch))
    bench.release()
    for name in names:
        try:
            runs[name] = partial(bench.peer(name), prompts_for(batch))
        except Exception as error:
            yield f"passed over, {name}", _traceback(error)
    for name, run in list(runs.items()):
        try:
            yield f"first run, {name}", _seconds(run)
        except Exception as error:
            yield f"failed, {name}", _traceback(error)
            del runs[name]
    yield "recordings", {name: _recordings(pipeline) for name, pipeline in loaded.items()}
    options = argparse.Namespace(rounds=ROUNDS, price_per_hour=None, ours=ours)
    part_s = time.perf_counter() + bench.left_s / 4
    yield "figures", measure_turns(runs, batch, options, part_s, warmup=0)


def _recordings(pipeline: Pipeline) -> int:
    """The number of recorded ticks."""
    ticks = pipeline.engines.run_recorded
    return len(ticks.recordings) if isinstance(ticks, Ticks) else 0


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-2000:]


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def stages(bench: Bench) -> Figures:
    """Each network's call beside its floor by this machine's ceilings."""
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
                yield f"{precision}, {rows} rows", measure_stages(shapes, work, ceilings, loaded)


def options(bench: Bench) -> Figures:
    """The whole UNet's call with each option of the backend; the default first."""
    setting = bench.setting
    cases = [(bench.precisions[0], line, line or "default") for line in ("", *OPTIONS)]
    cases += [("fp8", line, f"fp8, {line or 'default'}") for line in FP8_OPTIONS]
    for precision, line, name in cases:
        if bench.is_dry and line == "compile":
            continue
        pipeline = bench.pipeline(precision, options=line)
        shapes = Shapes(setting.side or pipeline.sizes.default, 2 if bench.is_dry else 2 * BATCH)
        with torch.inference_mode():
            deep = time_call(pipeline.engines, "unet_deep", shapes, 0.0)["seconds"]
        picture = partial(pipeline.generate, [bench.usual])
        first, second, third = (_seconds(picture) for _ in range(3))
        seconds = {"unet_deep_s": deep, "picture_s": min(second, third), "first_picture_s": first}
        yield name, seconds


def batching(bench: Bench) -> Figures:
    """Poisson arrivals in simulated time, with this GPU's measured ticks."""
    for precision in bench.precisions:
        device = arrivals.measure(bench.pipeline(precision))
        yield f"{precision}, costs", device.costs.as_dict()
        for mix_name, mix in arrivals.MIXES.items():
            capacity = device.capacity(mix)
            count = 100 if bench.is_dry else arrivals.IMAGES
            for load in arrivals.LOADS:
                coming = arrivals.draw_arrivals(load * capacity, mix, count)
                latencies = {
                    name: _latencies(*each)
                    for name, each in arrivals.compare_disciplines(device, coming).items()
                }
                yield f"{precision}, {mix_name}, {load:.0%} of {capacity:.3f} images/s", latencies


def _latencies(seconds: Sequence[float], best: str) -> dict[str, float | str]:
    mean_s = statistics.fmean(arrivals.drop_warm_up(seconds))
    best_of = {"best": best} if best else {}
    return {"mean_s": mean_s, "p99_s": arrivals.p99(seconds), **best_of}
