"""Sections on the service's loop without the service: warm-up, traces of one size and of several,
the loop's ETAs, and a picture alone.

A trace is 24 pictures at once with 10 to 30 steps and intervals of 1 to 3. Traces differ only in
their sizes, so each rate is compared with the rate at one size.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from engines.cuda.recordings import Ticks
from eval.gpu.bench import BATCH, Bench, Figures
from eval.measuring.timing import device_s, quantile, synchronize
from eval.speed.peers import prompts_for
from eval.speed.variants import INTERVALS, PROMPTS, paint
from sdxl import warmup
from sdxl.admission import Refused
from sdxl.cost import Costs
from sdxl.engine import Engines
from sdxl.inflight import Finished, InFlight
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

Size = tuple[int, int]
"""width and height"""
PICTURES = 24
DEADLINE_S = 20.0
"""the service's default"""
QUEUE = 400
FOUR: tuple[Size, ...] = ((1024, 1024), (1152, 896), (832, 1216), (1216, 832))
TALL: tuple[Size, ...] = (
    *((512, 2048), (512, 1984), (512, 1920), (512, 1856), (576, 1792), (576, 1728), (576, 1664)),
    *((640, 1600), (640, 1536), (704, 1472), (704, 1408), (704, 1344), (768, 1344), (768, 1280)),
    *((832, 1216), (832, 1152), (896, 1152), (896, 1088), (960, 1088), (960, 1024)),
)
OFFICIAL = (FOUR[0], *TALL, *((height, width) for width, height in TALL))
"""the sizes that SDXL was trained at"""
FREE = 12
"""the number of sizes outside OFFICIAL"""


def start(bench: Bench) -> Figures:
    """Load and warm up as the service does."""
    precision = bench.served
    yield "load_s", device_s(lambda: bench.pipeline(precision))
    pipeline = bench.pipeline(precision)
    with counted(pipeline.engines) as work:
        seconds = device_s(lambda: warm_loop(bench))
    loop = warm_loop(bench)
    yield "warm_up", {"seconds": seconds, **work, "failed": pipeline.engines.failed_captures()}
    yield "rows", {"usual": loop.limits.rows, "crowded": loop.limits.most_rows}
    yield "costs", loop.costs.as_dict()


def one_size(bench: Bench) -> Figures:
    """The trace to compare others with, and equal pictures that begin and end together."""
    yield from traces(bench, FOUR[:1])
    pipeline, prompts = bench.pipeline(bench.served), prompts_for(1 if bench.is_dry else BATCH)
    for interval in INTERVALS:
        run = partial(paint, pipeline, bench.setting, interval, prompts)
        _, *seconds = (device_s(run) for _ in range(2 if bench.is_dry else 4))
        rate = len(prompts) / statistics.median(seconds)
        yield f"{len(prompts)} equal, interval {interval}", {"seconds": seconds, "images/s": rate}


def four_sizes(bench: Bench) -> Figures:
    yield from traces(bench, FOUR)


def official_sizes(bench: Bench) -> Figures:
    yield from traces(bench, OFFICIAL)


def free_sizes(bench: Bench) -> Figures:
    """Multiples of 8 with at most the area of 1024²."""
    chance, sizes = random.Random(3), list[Size]()
    while len(sizes) < FREE:
        size = 8 * chance.randint(64, 192), 8 * chance.randint(64, 192)
        if size not in OFFICIAL and 600_000 < size[0] * size[1] <= 1 << 20:
            sizes.append(size)
    yield from traces(bench, sizes)


def traces(bench: Bench, sizes: Sequence[Size]) -> Figures:
    """Run the same trace twice. In the first run its sizes are new."""
    peer = None if len(sizes) == 1 else rate_of_one_size(bench)
    for name in ("first", "second"):
        figures = trace(bench, sizes)
        if peer:
            figures["of one size"] = figures["images/s"] / peer
        elif name == "second":
            bench.rate_of_one_size = figures["images/s"]
        yield name, figures


def rate_of_one_size(bench: Bench) -> float:
    if bench.rate_of_one_size is None:
        dict(traces(bench, FOUR[:1]))
    assert bench.rate_of_one_size is not None
    return bench.rate_of_one_size


def trace(bench: Bench, sizes: Sequence[Size]) -> dict[str, Any]:
    pipeline, loop = bench.pipeline(bench.served), warm_loop(bench)
    params = requests(bench, pipeline, sizes)
    conditionings = pipeline.encode(params)
    finished_s: list[float] = []
    latents: list[torch.Tensor] = []
    synchronize()
    with counted(pipeline.engines) as work:
        began = time.perf_counter()
        for each, conditioning in zip(params, conditionings, strict=True):
            loop.submit(pipeline.request(each, conditioning))
        ticks_s: list[float] = []
        while not loop.is_idle:
            start_s = time.perf_counter()
            events = loop.tick()
            now = time.perf_counter()
            ticks_s.append(now - start_s)
            finished_s += [now - began] * len(events)
            latents += [event.latents for event in events if isinstance(event, Finished)]
        synchronize()
        seconds = time.perf_counter() - began
    with counted(pipeline.engines) as decoding:
        decode_s = device_s(lambda: [pipeline.pixels(each) for each in latents])
    whole = sum(bool(each.isfinite().all()) for each in latents)
    area = statistics.fmean((each.width or 0) * (each.height or 0) for each in params)
    return {
        "images/s": len(params) / seconds,
        "seconds": seconds,
        "steps": sum(each.steps for each in params),
        "mean area": area,
        "broken": len(params) - whole,
        "p50_s": quantile(finished_s, 0.5),
        "ticks": len(ticks_s),
        "slowest_ticks_s": sorted(ticks_s)[-5:],
        **work,
        "decode_s": decode_s,
        "compiled for decoding": decoding["compiled"],
    }


def promises(bench: Bench) -> Figures:
    """The ETAs of denoised pictures beside their real times, the refused pictures, and the costs
    of calls now over their costs in the warm-up."""
    pipeline, loop = bench.pipeline(bench.served), warm_loop(bench)
    params = requests(bench, pipeline, FOUR)
    warm_costs = dict(bench.warm_costs.ticks)
    refused: list[str] = []
    for each, conditioning in zip(params, pipeline.encode(params), strict=True):
        request = pipeline.request(each, conditioning)
        try:
            loop.submit(replace(request, deadline_s=loop.clock() + DEADLINE_S))
        except Refused as error:
            refused.append(str(error))
    began, promised = loop.clock(), loop.finish_times()
    decode_s = {f.id: loop.costs.decoded_s(f, loop.limits) for f in loop.flights}
    late: list[float] = []
    failed: list[str] = []
    while not loop.is_idle:
        for event in loop.tick():
            if isinstance(event, Finished):
                expected_s = promised[event.id] - decode_s[event.id] - began
                late.append((loop.clock() - began) / expected_s - 1)
            else:
                failed.append(repr(event.cause))
    yield "admitted", {"refused": refused, "failed": failed, "finished": len(late)}
    yield "late", {"p50": quantile(late, 0.5), "least": min(late), "most": max(late)}
    ratios = {
        f"{key.call.network}, {key.bucket} rows": loop.costs.ticks[key] / seconds
        for key, seconds in warm_costs.items()
        if loop.costs.ticks.get(key, seconds) != seconds
    }
    yield "cost now over warm-up", ratios


def one_client(bench: Bench) -> Figures:
    """Pictures one after the other."""
    pipeline = bench.pipeline(bench.served)
    for interval in INTERVALS:
        params = pipeline.resolve(replace(bench.usual, cache_interval=interval, seed=0))
        results = []
        seconds = []
        for _ in range(2 if bench.is_dry else 6):
            began = time.perf_counter()
            (result,) = pipeline.generate([params])
            seconds.append(time.perf_counter() - began)
            results.append(result.timings)
        stages = {name: statistics.median(r[name] for r in results[1:]) for name in results[0]}
        yield f"interval {interval}", {"seconds": statistics.median(seconds[1:]), **stages}


def warm_loop(bench: Bench) -> InFlight:
    """The service's loop, warmed up at the first call."""
    if bench.loop is None:
        pipeline = bench.pipeline(bench.served)
        loop = pipeline.in_flight(Costs())
        rooms = warmup.Rooms(*3 * (lambda work: work(),))
        warmup.measure(pipeline, rooms, loop.costs)
        loop.limits = warmup.knee(pipeline, loop.costs, QUEUE)
        bench.loop, bench.warm_costs = loop, Costs(dict(loop.costs.ticks))
    return bench.loop


@contextmanager
def counted(engines: Engines) -> Iterator[Counter[str]]:
    """Count `compiled` kernels and kernels `loaded` from the disk, which a warm loop has none of,
    and at the end the ticks by how they ran."""
    counts: Counter[str] = Counter()

    def listen(*, cache_hit: bool, **_: Any) -> None:
        counts["loaded" if cache_hit else "compiled"] += 1

    ticks = engines.run_recorded
    before = Counter(ticks.counts) if isinstance(ticks, Ticks) else Counter[str]()
    with ExitStack() as stack:
        # Without a GPU, Triton may be missing.
        with suppress(ImportError):
            from triton import knobs

            stack.enter_context(patch.object(knobs.compilation, "listener", listen))
        yield counts
    if isinstance(ticks, Ticks):
        counts += ticks.counts - before


def requests(bench: Bench, pipeline: Pipeline, sizes: Sequence[Size]) -> list[GenerationParams]:
    """The same steps, intervals and seeds for all sizes."""
    chance, choice = random.Random(7), random.Random(8)
    count, longest = (3, 3) if bench.is_dry else (PICTURES, 30)
    made = []
    for seed in range(count):
        width, height = choice.choice(sizes)
        if bench.is_dry:
            width, height = (max(side // 128 * 8, 64) for side in (width, height))
        made.append(
            replace(
                bench.usual,
                prompt=PROMPTS[seed % len(PROMPTS)],
                seed=seed,
                steps=longest * chance.randint(1, 3) // 3,
                cache_interval=chance.randint(1, 3),
                width=width,
                height=height,
            )
        )
    return [pipeline.resolve(each) for each in made]
