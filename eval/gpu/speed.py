"""Ours beside diffusers, in turns: one figure at a time."""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from eval.gpu.bench import BATCH, Bench
from eval.measuring.timing import Run
from eval.speed.peers import measure_turns, prompts_for
from eval.speed.variants import CACHED, EAGER, INTERVALS, paint, variant_name

Figures = Iterator[tuple[str, Any]]
ROUNDS = 3


def peers(bench: Bench) -> Figures:
    """Ours first. A failure costs only its own figures. The first run of each is recorded too, so a
    kill before the rounds end loses only the spread."""
    batch = 1 if bench.is_dry else BATCH
    ours = [f"torch:{precision}" for precision in bench.precisions]
    runs: dict[str, Run] = {}
    yield "batch", batch
    for each, precision in zip(ours, bench.precisions, strict=True):
        try:
            pipeline = bench.pipeline(precision)
            bench.warm(pipeline, batch)
        except Exception as error:
            yield f"passed over, {each}", _traceback(error)
            continue
        for interval in INTERVALS:
            name = variant_name(each, interval)
            runs[name] = partial(paint, pipeline, bench.setting, interval, prompts_for(batch))
    bench.release()
    for name in (EAGER, CACHED):
        try:
            runs[name] = partial(bench.peer(name), prompts_for(batch))
        except Exception as error:
            yield f"passed over, {name}", _traceback(error)
    for name, run in list(runs.items()):
        try:
            yield f"first run, {name}", synchronized_s(run)
        except Exception as error:
            yield f"failed, {name}", _traceback(error)
            del runs[name]
    options = argparse.Namespace(rounds=ROUNDS, price_per_hour=None, ours=ours)
    part_s = time.perf_counter() + bench.left_s / 4
    yield "figures", measure_turns(runs, batch, options, part_s, warmup=0)


def _traceback(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-2000:]


def synchronized_s(run: Callable[[], object]) -> float:
    """Seconds until the device is done."""
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
