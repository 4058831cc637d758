"""`sdxl bench peers`: speed beside peers with the same weights, prompts, steps, sizes and threads.

Variants take turns in every round; figures are the median, minimum and maximum. Peak memory is
measured in one process for each variant. On a GPU the model has SDXL's full size with random
weights, at 1024×1024: speed does not depend on the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eval.measuring.energy import open_meter
from eval.measuring.system_description import describe_system
from eval.measuring.timing import Run, Spread, ratio, take_turns
from eval.speed import variants
from eval.speed.variants import (
    COMPILED,
    COMPILED_CACHED,
    INTERVALS,
    OURS,
    PEERS,
    PROMPTS,
    BenchSetting,
    load_all,
    load_one,
    variant_name,
)
from onnx_export.random_weights import write_checkpoint
from sdxl import memory
from sdxl.arguments import Parser, add_option, number, whole
from sdxl.files import prepare_folder, write_atomic, write_json

FULL_SIZE = Path("out/full-size/model")
BUDGET_S = 540.0
Report = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    options.ours = options.ours or list(OURS["cuda" if torch.cuda.is_available() else "cpu"])
    model = options.model or (full_size() if torch.cuda.is_available() else "mini")
    setting = BenchSetting(model, options.side, options.steps)
    if options.memory_of:
        print(peak_bytes(setting, options))
        return 0
    report = measure(setting, options, list(argv))
    if options.out:
        write_report(report, Path(options.out))
    print(json.dumps(report, default=asdict) if options.is_json else table(report))
    return 0


def build_parser() -> Parser:
    parser = Parser(prog="sdxl bench peers", description="Speed against peers, in one run.")
    add = partial(add_option, parser)
    add("--model", None, "default: mini on a CPU, random weights of full size on a GPU")
    add("--side", None, "of the image (default: the model's)", "PIXELS", type=whole)
    add("--batch", [1, 4, 8], "pictures at once")
    add("--rounds", 7, "at most")
    add("--steps", variants.STEPS, "of each picture")
    add("--ours", None, "our variants", "BACKEND:PRECISION", nargs="+")
    add("--no-compile", False, "leave torch.compile out")
    add("--no-memory", False, "leave peak memory out")
    add("--time-budget", BUDGET_S, "time limit", "SECONDS")
    add("--price-per-hour", None, "adds images per dollar", "DOLLARS", type=number)
    add("--out", None, "also write peers.json and peers.txt there", "DIR")
    add("--json", False, "print the figures as one JSON object", dest="is_json")
    add("--memory-of", None, argparse.SUPPRESS)
    return parser


def full_size() -> str:
    if not FULL_SIZE.exists():
        prepare_folder(FULL_SIZE.parent)
        write_checkpoint(FULL_SIZE)
    return str(FULL_SIZE)


def measure(setting: BenchSetting, options: argparse.Namespace, argv: list[str]) -> Report:
    until_s = time.perf_counter() + options.time_budget
    loaded = load_all(setting, options.ours, has_compile=not options.no_compile)
    # A compiled variant uses as much memory as the eager one, and compiling takes minutes.
    weighed = {} if options.no_memory else loaded.paints.keys() - {COMPILED, COMPILED_CACHED}
    memory = {name: _peak(name, argv) for name in loaded.paints if name in weighed}
    report: Report = {
        "system": describe_system(),
        "model": setting.model,
        "steps": setting.steps,
        "passed_over": loaded.passed_over,
        "peak_bytes": memory,
        "batches": {},
    }
    for done, batch in enumerate(options.batch):
        now = time.perf_counter()
        part_s = max(until_s - now, 0) / (len(options.batch) - done)
        prompts = prompts_for(batch)
        runs = {name: partial(paint, prompts) for name, paint in loaded.paints.items()}
        report["batches"][batch] = measure_turns(runs, batch, options, now + part_s)
    return report


def prompts_for(batch: int) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(batch)]


def measure_turns(
    runs: Mapping[str, Run], batch: int, options: argparse.Namespace, until_s: float
) -> Report:
    """The figures of one batch size, with the ratios to peers and between intervals."""
    joules: dict[str, list[float]] = {}
    counter = open_meter()
    metered = {n: _metered(run, joules.setdefault(n, []), counter) for n, run in runs.items()}
    seconds = take_turns(metered, options.rounds, until_s=until_s)
    report: Report = {
        "seconds": spreads(seconds, lambda s: s),
        "images/s": spreads(seconds, lambda s: batch / s),
    }
    if counter is not None:
        energy = {name: joules[name][-len(values) :] for name, values in seconds.items()}
        report["joules an image"] = spreads(energy, lambda j: j / batch)
    if price := options.price_per_hour:
        report["images per dollar"] = spreads(seconds, lambda s: 3600 * batch / s / price)
    return report | compare_peers(seconds, options.ours)


def spreads(
    rounds: Mapping[str, list[float]], figure: Callable[[float], float]
) -> dict[str, Spread]:
    return {name: Spread.of([*map(figure, values)]) for name, values in rounds.items()}


def compare_peers(seconds: Mapping[str, list[float]], ours: Sequence[str]) -> Report:
    by_peer: Report = {
        f"times as fast as {peer}": {
            name: ratio(seconds[peer], values) for name, values in seconds.items() if name != peer
        }
        for peer in PEERS
        if peer in seconds
    }
    one, two = INTERVALS
    by_peer["time at interval 2 over interval 1"] = {
        each: ratio(seconds[variant_name(each, two)], seconds[variant_name(each, one)])
        for each in ours
        if variant_name(each, one) in seconds
    }
    return by_peer


def _metered(run: Run, joules: list[float], counter: Callable[[], float] | None) -> Run:
    if counter is None:
        return run

    def measured() -> None:
        before = counter()
        run()
        torch.cuda.synchronize()
        joules.append(counter() - before)

    return measured


def _peak(name: str, argv: list[str]) -> int:
    command = [sys.executable, "-m", "sdxl.cli", "bench", "peers", *argv, "--memory-of", name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(output.split()[-1])


def peak_bytes(setting: BenchSetting, options: argparse.Namespace) -> int:
    """The peak memory of this process for a deep and a shallow step of the largest batch."""
    # Subtract the parent process, which holds every variant on the same GPU.
    others = gpu_bytes()
    paint = load_one(replace(setting, steps=2), options.memory_of, options.ours)
    paint(prompts_for(max(options.batch)))
    return gpu_bytes() - others if torch.cuda.is_available() else memory.peak_bytes()


def gpu_bytes() -> int:
    """The GPU memory of all processes and libraries; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def write_report(report: Report, folder: Path) -> None:
    prepare_folder(folder)
    write_json(folder / "peers.json", report, end="", default=asdict)
    write_atomic(folder / "peers.txt", (table(report) + "\n").encode())


def table(report: Report) -> str:
    system = report["system"]
    machine = ", ".join(system["accelerators"]) or f"{system['processor']}, {system['cores']} cores"
    lines = [f"{machine}, torch {system['packages']['torch']}; {report['model']}"]
    lines += [f"passed over: {name}: {why}" for name, why in report["passed_over"].items()]
    if report["peak_bytes"]:
        lines.append("\npeak memory, MiB")
        lines += [f"    {name:<36} {n / 2**20:.0f}" for name, n in report["peak_bytes"].items()]
    for batch, figures in report["batches"].items():
        lines.append(f"\nbatch {batch}, {report['steps']} steps: median (least to most)")
        for title, rows in figures.items():
            lines.append(f"  {title}")
            lines += [f"    {name:<36} {spread:.3f}" for name, spread in rows.items()]
    return "\n".join(lines)
