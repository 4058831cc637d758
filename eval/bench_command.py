"""`sdxl bench`: a table of benchmarks, each a module with a `main` of its own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from sdxl.params import InvalidParams

BENCHMARKS = {
    "peers": ("speed.peers", "speed against diffusers and others, same weights and steps"),
    "floor": (
        "speed.floor",
        "the arithmetic of a step, and the share of the machine's best reached",
    ),
    "mlperf": ("mlperf.command", "the official LoadGen: Offline, Server, SingleStream"),
    "load": ("service.load", "the service under load: latency, throughput, overload"),
    "marking": ("service.marking", "what provenance and watermark cost a service"),
    "h200": ("h200.command", "everything on one H200 in ten minutes; --dry-run anywhere"),
    "batching": ("speed.batching", "in-flight against static batching, in simulated time"),
    "robustness": (
        "robustness.command",
        "load beyond capacity, leavers, nonsense, kills, a soak: what the service stands",
    ),
    "sizing": ("service.sizing", "what an image in flight takes, and where the knee lies"),
    "llm": ("llm.bench", "a language model: first token, each token, tokens a dollar"),
}
"""Module below eval, and what it measures."""


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["-h" | "--help", *_]:
            print(usage())
            return 0
        case [name, *rest] if name in BENCHMARKS:
            result: int = importlib.import_module(f"eval.{BENCHMARKS[name][0]}").main(rest)
            return result
        case _:
            asked = argv[0] if argv else None
            raise InvalidParams("benchmark", asked, f"needed one of {', '.join(BENCHMARKS)}")


def usage() -> str:
    rows = (f"  {name:<12}{text}" for name, (_, text) in BENCHMARKS.items())
    return "\n".join(("usage: sdxl bench BENCHMARK …", "", *rows))
