"""`sdxl bench`: a table of benchmarks, each a module with a `main`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from sdxl.params import InvalidParams

BENCHMARKS = {
    "peers": ("speed.peers", "speed against diffusers and others, same weights and steps"),
    "floor": ("speed.floor", "the arithmetic of a step, and engines beside the machine's limit"),
    "mlperf": ("mlperf.command", "the official LoadGen: Offline, Server, SingleStream"),
    "load": ("service.load", "the service under load: latency, throughput, overload"),
    "fleet": ("fleet.command", "up to 10,000 GPUs, simulated: latency, refusals, cost, routing"),
    "gpu": ("gpu.command", "one GPU, in four minutes: start, one size, mixed sizes, promises"),
    "sizing": ("service.sizing", "memory of an image in flight, and the cost of UNet calls"),
    "llm": ("llm.bench", "a language model: time to tokens, tokens per second and dollar"),
}
"""module below eval, and what it measures"""


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["-h" | "--help" | "--help-all", *_]:
            rows = (f"  {name:<12}{text}" for name, (_, text) in BENCHMARKS.items())
            print("\n".join(("usage: sdxl bench BENCHMARK …", "", *rows)))
            return 0
        case [name, *rest] if name in BENCHMARKS:
            result: int = importlib.import_module(f"eval.{BENCHMARKS[name][0]}").main(rest)
            return result
        case _:
            unknown = argv[0] if argv else None
            raise InvalidParams.unknown("benchmark", unknown, BENCHMARKS)
