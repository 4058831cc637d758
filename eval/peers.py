"""Speed against peers: same weights, prompts, steps, sizes and threads, in one run.

    python -m eval.peers [--batch 1 8] [--rounds 7]

Every variant goes from prompts to image tensors. It judges nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

import engines
from eval.timing import Spread, ratio, take_turns
from sdxl.checkpoint import find
from sdxl.params import GenerationParams

STEPS = 20
PROMPTS = (
    "a red circle on a blue background",
    "a small yellow star above a green square on a white background",
    "two purple triangles on a black background",
    "a large orange ring on a white background",
)
EAGER, CACHED, COMPILED = "diffusers eager", "diffusers + DeepCache", "diffusers + torch.compile"
BACKENDS = ("torch", "onnxruntime")

Variant = Callable[[], object]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sdxl bench peers", description=__doc__)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object")
    args = parser.parse_args(argv)
    report = {
        "machine": _machine(),
        "batches": {
            batch: measure(args.model, batch, args.rounds, has_compile=not args.no_compile)
            for batch in args.batch
        },
    }
    print(json.dumps(report, default=asdict) if args.json else table(report))
    return 0


def measure(
    model: str, batch: int, rounds: int, *, has_compile: bool
) -> dict[str, dict[str, Spread]]:
    """Seconds of a batch by variant, and the ratios that the project's goals are stated in."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(batch)]
    variants = _peers(model, prompts, has_compile) | _ours(model, prompts)
    seconds = take_turns(variants, rounds, warmup=2)
    peers = [name for name in (EAGER, CACHED, COMPILED) if name in seconds]
    figures = {"seconds": {name: Spread.of(values) for name, values in seconds.items()}}
    for peer in peers:
        figures[f"times as fast as {peer}"] = {
            name: ratio(seconds[peer], values) for name, values in seconds.items() if name != peer
        }
    figures["time at interval 2 over interval 1"] = {
        backend: ratio(seconds[_name(backend, 2)], seconds[_name(backend, 1)])
        for backend in BACKENDS
    }
    return figures


def _name(backend: str, interval: int) -> str:
    return f"ours, {backend}, interval {interval}"


def _ours(model: str, prompts: list[str]) -> dict[str, Variant]:
    variants: dict[str, Variant] = {}
    for backend in BACKENDS:
        pipeline = engines.load(model, backend)
        for interval in (1, 2):
            params = [
                GenerationParams(prompt, steps=STEPS, seed=i, cache_interval=interval)
                for i, prompt in enumerate(prompts)
            ]
            variants[_name(backend, interval)] = partial(pipeline.generate, params)
    return variants


def _peers(model: str, prompts: list[str], has_compile: bool) -> dict[str, Variant]:
    from DeepCache import DeepCacheSDHelper

    plain, cached = _diffusers(model), _diffusers(model)
    helper = DeepCacheSDHelper(pipe=cached)
    helper.set_params(cache_interval=2, cache_branch_id=0)
    helper.enable()
    variants: dict[str, Variant] = {
        EAGER: partial(_run, plain, prompts),
        CACHED: partial(_run, cached, prompts),
    }
    if has_compile:
        compiled = _diffusers(model)
        compiled.unet = torch.compile(compiled.unet)
        variants[COMPILED] = partial(_run, compiled, prompts)
    return variants


def _diffusers(model: str) -> Any:
    from diffusers import StableDiffusionXLPipeline

    folder = str(find(model).folder)
    pipe: Any = StableDiffusionXLPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _run(pipe: Any, prompts: list[str]) -> object:
    generators = [torch.Generator("cpu").manual_seed(i) for i in range(len(prompts))]
    return pipe(
        prompts,
        num_inference_steps=STEPS,
        guidance_scale=GenerationParams().guidance,
        generator=generators,
        output_type="pt",
    )


def _machine() -> str:
    name = platform.machine()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        name = next((x.split(": ")[1].strip() for x in lines if x.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}"


def table(report: dict[str, Any]) -> str:
    lines = [report["machine"]]
    for batch, figures in report["batches"].items():
        lines.append(f"\nbatch {batch}, {STEPS} steps: median (least to most)")
        for what, rows in figures.items():
            lines.append(f"  {what}")
            lines += [f"    {name:<34} {spread:.3f}" for name, spread in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
