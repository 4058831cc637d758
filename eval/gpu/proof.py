"""Sections on correctness: the error to float32 by step, NaN, the PSNR of pictures, and a profile
which shows that the host does not wait within a step.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from engines.parity.calls import EngineCall, call_errors, record_calls
from engines.parity.findings import psnr, relative_norm
from eval.gpu.bench import BATCH, Bench, Figures
from eval.gpu.kernels import milliseconds
from eval.measuring.timing import wall_s
from eval.speed.meta_networks import UNETS
from eval.speed.variants import PROMPTS
from sdxl.engine import Engines
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from sdxl.scheduler_names import SCHEDULERS

WAITS = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaEventSynchronize"),
    "cuStreamSynchronize",
)
"""calls in which the host waits; the loop itself waits for the event of the call before the last"""
PROFILED = 6
LEAST_PSNR_DB = 40.0


def agreement(bench: Bench) -> Figures:
    """Relative L2 to float32 of every step's noise, on the same inputs, and of the latents."""
    torch.backends.cudnn.allow_tf32 = False
    for model in dict.fromkeys(("mini", bench.setting.model)):
        reference = bench.pipeline("fp32", model)
        params = bench.usual if model != "mini" or bench.is_dry else GenerationParams(PROMPTS[0])
        params = reference.resolve(replace(params, seed=0))
        calls = unet_calls(reference, params)
        (expected,) = reference.generate([params])
        assert expected.latents is not None, expected.error
        for precision in dict.fromkeys((*bench.precisions, "bf16")):
            if precision == "fp32" or (bench.is_dry and precision == "bf16"):
                continue
            pipeline = bench.pipeline(precision, model)
            (result,) = pipeline.generate([params])
            assert result.latents is not None, result.error
            steps = call_errors(pipeline.engines, calls)
            latents = relative_norm(result.latents.float().cpu(), expected.latents.float().cpu())
            yield f"{model}, {precision}", {"by_step": steps, "final_latents": latents}


def unet_calls(pipeline: Pipeline, params: GenerationParams) -> list[EngineCall]:
    """Every UNet call of a picture, in order."""
    # A replayed recording would skip the listeners.
    plain = replace(pipeline.engines, run_recorded=Engines.run_recorded)
    engines, calls = record_calls(plain, *UNETS)
    (result,) = Pipeline(pipeline.checkpoint, engines).generate([params])
    if result.error:
        raise result.error
    return calls


def pictures(bench: Bench) -> Figures:
    """PSNR of the embedded model's pictures to float32's on the same machine."""
    count = 1 if bench.is_dry else 8
    params = [
        replace(bench.usual if bench.is_dry else GenerationParams(), prompt=PROMPTS[i % 4], seed=i)
        for i in range(count)
    ]
    expected = bench.pipeline("fp32", "mini").generate(params)
    for precision in bench.precisions:
        results = bench.pipeline(precision, "mini").generate(params)
        values = []
        for result, reference in zip(results, expected, strict=True):
            assert result.image is not None and reference.image is not None, result.error
            values.append(psnr(result.image.cpu(), reference.image.cpu()))
        yield precision, {"psnr_db": values, "least": min(values), "needed_fp16": LEAST_PSNR_DB}


def requests(bench: Bench) -> Figures:
    """Random requests, all in flight together. A picture with NaN counts as broken."""
    chance, count = random.Random(0), 4 if bench.is_dry else 100
    for precision in bench.precisions:
        params = [_random_request(chance, number, bench.is_dry) for number in range(count)]
        results = bench.pipeline(precision, "mini").generate(params)
        errors = [f"{r.params}: {r.error}" for r in results if r.error is not None]
        yield precision, {"requests": count, "broken": len(errors), "errors": errors[:5]}


def _random_request(chance: random.Random, number: int, is_dry: bool) -> GenerationParams:
    return GenerationParams(
        chance.choice(PROMPTS),
        seed=number,
        steps=chance.randint(1, 3 if is_dry else 30),
        guidance=chance.choice((0.0, 1.0, 3.0, 5.0, 8.0)),
        scheduler=chance.choice([*SCHEDULERS]),
        cache_interval=chance.randint(1, 4),
        width=64 if is_dry else chance.choice((96, 128, 160)),
        height=64 if is_dry else chance.choice((96, 128, 160)),
    )


def profile(bench: Bench) -> Figures:
    for precision in bench.precisions[: 1 if bench.is_dry else None]:
        for interval in (1, 2):
            trace = bench.out / f"trace-{precision}-{interval}.json.gz"
            figures = _profiled(bench, bench.pipeline(precision), interval, trace)
            if interval == 1 and not bench.is_dry:
                figures["ms_by_group"] = milliseconds(trace, precision, "unet_deep", 2 * BATCH)
            yield f"{precision}, interval {interval}", figures


def _profiled(bench: Bench, pipeline: Pipeline, interval: int, trace: Path) -> dict[str, Any]:
    """Profile ticks after their graphs are recorded, and write a trace of every kernel. A wait for
    the device raises an error."""
    steps = 3 * PROFILED + 8
    params = pipeline.resolve(replace(bench.usual, steps=steps, cache_interval=interval))
    engines = replace(pipeline.engines, calls_ahead=steps)  # no tick waits for another
    loop = replace(pipeline, engines=engines).in_flight()
    (conditioning,) = pipeline.encode([params])
    for seed in range(1 if bench.is_dry else BATCH):
        loop.submit(pipeline.request(replace(params, seed=seed), conditioning))
    for _ in range(8):
        loop.tick()
    activities = [ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        host_s = wall_s(lambda: [loop.tick() for _ in range(PROFILED)]) / PROFILED
        with torch_profile(activities=activities) as profiler:
            for _ in range(PROFILED):
                loop.tick()
            if bench.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
    finally:
        if bench.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    loop.drain()
    profiler.export_chrome_trace(str(trace))
    return {"host_s_a_tick": host_s, **_read(profiler)}


def _read(profiler: Any) -> dict[str, Any]:
    """The host's waits (the last is the profiler's) and launches, and the time by kernel."""
    averages = profiler.key_averages()
    calls = Counter({e.key: e.count for e in averages if e.key.startswith("cu")})
    by_time = sorted(averages, key=lambda e: e.self_device_time_total, reverse=True)
    kernels = {e.key[:80]: e.self_device_time_total / PROFILED for e in by_time[:20]}
    waits = {name: calls[name] for name in WAITS}
    figures = {"ticks": PROFILED, "waits": waits, "calls": dict(calls)}
    return {**figures, "device_us_a_tick": {name: us for name, us in kernels.items() if us}}
