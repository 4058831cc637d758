"""`sdxl bench robustness RUN`: load or damage a service, and check conditions.

RUN is load, overload, leavers, soak, fuzz or all. It starts `sdxl serve` here with a double of
SDXL's full size (eval/service/double.py); fuzz uses the embedded models, with text.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from eval.robustness import runs
from eval.robustness.report import RunReport
from eval.service import double
from eval.service.client import local_service
from sdxl.arguments import Parser, check_positive, number, whole
from sdxl.params import InvalidParams

LIGHT, HEAVY = 0.8, 1.5
"""shares of the service's capacity"""
CHEAP = (
    *("--max-steps", "2", "--max-n", "2", "--deadline-s", "8", "--max-deadline-s", "8"),
    *("--body-timeout-s", "5"),
)
SEVERAL = ("--replicas", "2", "--ingresses", "2")
RUNS = ("load", "overload", "leavers", "soak", "fuzz")


def main(argv: Sequence[str] | None = None) -> int:
    options = read_options(sys.argv[1:] if argv is None else argv)
    names = RUNS if options.run == "all" else (options.run,)
    holds = True
    for name in names:
        report = run(name, options)
        report.write(Path(options.out))
        print(f"{report.name}\n{runs.dump(report)}", flush=True)
        holds = holds and report.holds
    return 0 if holds else 1


def read_options(argv: Sequence[str]) -> Any:
    parser = Parser(
        prog="sdxl bench robustness", description="Load or damage a service, and check it."
    )
    add = parser.add_argument
    add("run", metavar="RUN", help=f"all, or one of {', '.join(RUNS)}")
    plan = runs.RunPlan()
    add("--seconds", type=number, default=plan.seconds, help="duration of each run (%(default)s)")
    add(
        "--count",
        type=whole,
        default=plan.count,
        help="leavers: clients; fuzz: requests (%(default)s)",
    )
    add(
        "--first",
        type=whole,
        default=plan.first,
        help="fuzz: number of the first request (%(default)s)",
    )
    add("--seed", type=whole, default=plan.seed, help="of random choices (%(default)s)")
    add(
        "--kill-every-s",
        type=number,
        default=plan.kill_every_s,
        metavar="S",
        help="soak: seconds between two kills of a process; 0 = none (%(default)s)",
    )
    add("--rate", type=number, default=1.0, help="soak: clients a second (%(default)s)")
    add("--speed", type=number, default=1.0, help="of the double; 1 = an H200 (%(default)s)")
    add("--rows", type=whole, default=4, help="rows of the double's largest call (%(default)s)")
    add("--out", default="out/robustness", metavar="DIR", help="reports (%(default)s)")
    options = parser.parse_args(argv)
    if options.run not in (*RUNS, "all"):
        raise InvalidParams("run", options.run, f"needed all, or one of {', '.join(RUNS)}")
    check_positive(options, "seconds", "count", "rate")
    return options


def run(name: str, options: Any) -> RunReport:
    plan = runs.RunPlan(
        options.seconds, options.seed, options.kill_every_s, options.count, options.first
    )
    coroutines: dict[str, Callable[[str], Coroutine[Any, Any, RunReport]]] = {
        "load": lambda url: runs.load(url, plan, LIGHT),
        "overload": lambda url: runs.load(url, plan, HEAVY),
        "leavers": lambda url: runs.leave(url, plan),
        "soak": lambda url: runs.soak(url, plan, options.rate),
        "fuzz": lambda url: runs.fuzz(url, plan),
    }
    with (
        tempfile.TemporaryDirectory() as scratch,
        local_service(flags_of(name, options, Path(scratch))) as url,
    ):
        return asyncio.run(coroutines[name](url))


def flags_of(name: str, options: Any, scratch: Path) -> list[str]:
    results = ["--results-dir", str(scratch / "results")]
    if name == "fuzz":
        return [*CHEAP, *results, "--sdapi", "--batches-dir", str(scratch / "batches")]
    settings = double.Settings(options.speed, options.rows)
    model = double.write(scratch / "sdxl-double", settings)
    several = SEVERAL if name == "soak" else ()
    flags = ["--model", str(model), "--backend", double.BACKEND, "--llm", "none"]
    return [*flags, *several, *results]
