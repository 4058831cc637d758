"""Speed against peers: same weights, prompts, steps, sizes and threads, in one run.

python -m eval.peers [--batch 1 8] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
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
EAGER = "diffusers, eager"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sdxl bench peers", description=__doc__)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--batch", type=int, nargs="+", default=[4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object")
    args = parser.parse_args(argv)
    report = {
        "machine": f"{platform.processor() or platform.machine()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
        "batches": {batch: measure(args.model, batch, args.rounds) for batch in args.batch},
    }
    print(json.dumps(report, default=asdict) if args.json else table(report))
    return 0


def measure(model: str, batch: int, rounds: int) -> dict[str, dict[str, Spread]]:
    """Seconds of a batch by variant, and its ratio to diffusers' own pipeline."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(batch)]
    variants: dict[str, Callable[[], object]] = {EAGER: _diffusers(model, prompts)}
    variants |= _ours(model, prompts)
    seconds = take_turns(variants, rounds)
    one, two = (next(n for n in seconds if n.endswith(f"interval {i}")) for i in (1, 2))
    return {
        "seconds": {name: Spread.of(values) for name, values in seconds.items()},
        "times as fast as diffusers": {
            name: ratio(seconds[EAGER], values) for name, values in seconds.items()
        },
        "interval 2 over interval 1": {two: ratio(seconds[two], seconds[one])},
    }


def _ours(model: str, prompts: list[str]) -> dict[str, Callable[[], object]]:
    pipeline = engines.load(model, "torch")

    def run(interval: int) -> Callable[[], object]:
        params = [
            GenerationParams(prompt, steps=STEPS, seed=i, cache_interval=interval)
            for i, prompt in enumerate(prompts)
        ]
        return lambda: pipeline.generate(params)

    return {f"ours, torch, interval {i}": run(i) for i in (1, 2)}


def _diffusers(model: str, prompts: list[str]) -> Callable[[], object]:
    from diffusers import StableDiffusionXLPipeline

    pipe: Any = StableDiffusionXLPipeline.from_pretrained(
        str(find(model).folder), torch_dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)

    def run() -> object:
        generators = [torch.Generator("cpu").manual_seed(i) for i in range(len(prompts))]
        return pipe(
            prompts,
            num_inference_steps=STEPS,
            guidance_scale=GenerationParams().guidance,
            generator=generators,
            output_type="pt",
        )

    return run


def table(report: dict[str, Any]) -> str:
    lines = [report["machine"]]
    for batch, figures in report["batches"].items():
        lines.append(f"\nbatch {batch}, {STEPS} steps (median, least to most over the rounds)")
        for what, rows in figures.items():
            lines.append(f"  {what}")
            lines += [f"    {name:<32} {spread:.3f}" for name, spread in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
