"""ONNX Runtime's session options, measured: load time, time of a call, and peak memory.

sdxl bench sessions [--side 128] [--rows 2 16] [--rounds 20]

Every variant runs in a process of its own, because threads and memory are a process's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engines import onnxruntime_engine
from engines.folders.shipped import open_mini
from engines.onnxruntime_engine import load_onnxruntime, session_options
from eval.measuring.timing import Spread
from sdxl.engine import Engines, allocate, torch_dtype
from sdxl.memory import peak_bytes
from sdxl.specs import CHUNK, image_axes

Change = Callable[[Any], None]
NETWORKS = ("unet_deep", "unet_shallow", "vae_decoder")


def _set(**attributes: Any) -> Change:
    def change(options: Any) -> None:
        for name, value in attributes.items():
            setattr(options, name, value)

    return change


def _entry(name: str, value: str) -> Change:
    return lambda options: options.add_session_config_entry(name, value)


VARIANTS: Mapping[str, Change] = {
    "as chosen": _set(),
    "plan the reuse of memory": _set(enable_mem_reuse=True),
    "no memory patterns": _set(enable_mem_pattern=False),
    "no arena": _set(enable_cpu_mem_arena=False),
    "no packed weights": _entry("session.disable_prepacking", "1"),
    "threads spin on": _entry("session.force_spinning_stop", "0"),
    "threads never spin": _entry("session.intra_op.allow_spinning", "0"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sdxl bench sessions", description=__doc__)
    parser.add_argument("--side", type=int, default=128, help="of the images, in pixels")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--variant", choices=list(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.variant:
        print(json.dumps(measure(VARIANTS[args.variant], args.side, args.rows, args.rounds)))
        return 0
    given = sys.argv[1:] if argv is None else argv
    for name in VARIANTS:
        command = [sys.executable, "-m", "eval.speed.session_options", *given, "--variant", name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(f"{name}\n{table(json.loads(output))}")
    return 0


def measure(change: Change, side: int, rows: list[int], rounds: int) -> dict[str, Any]:
    def changed(threads: int, has_arena: bool = True) -> Any:
        options = session_options(threads, has_arena)
        change(options)
        return options

    onnxruntime_engine.session_options = changed
    start = time.perf_counter()
    engines = load_onnxruntime(open_mini())
    figures: dict[str, Any] = {"load_s": time.perf_counter() - start, "calls_ms": {}}
    for name in NETWORKS:
        for count in rows if name != "vae_decoder" else [1]:
            seconds = timed(engines, name, count, side, rounds)
            figures["calls_ms"][f"{name}, {count}"] = [1000 * s for s in seconds]
    figures["peak_mib"] = peak_bytes() / 2**20
    figures["threads"] = torch.get_num_threads()
    return figures


def timed(engines: Engines, name: str, count: int, side: int, rounds: int) -> list[float]:
    engine, latent = engines[name], side // engines.arch.vae_scale
    axes = {"rows": count, "batch": count, "tokens": CHUNK, "latent_h": latent, "latent_w": latent}
    axes |= image_axes(engines.arch, latent, latent)
    inputs = {t.name: torch.randn(t.shape(axes)).to(torch_dtype(t)) for t in engine.spec.inputs}
    outputs = {t.name: allocate(t, axes) for t in engine.spec.outputs}
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        engine(inputs, outputs)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def table(figures: Mapping[str, Any]) -> str:
    calls = [f"  {name:<20} {Spread.of(ms):.2f} ms" for name, ms in figures["calls_ms"].items()]
    summary = f"  loaded in {figures['load_s']:.2f} s, peak {figures['peak_mib']:.0f} MiB"
    return "\n".join([f"{summary}, {figures['threads']} threads", *calls])


if __name__ == "__main__":
    raise SystemExit(main())
