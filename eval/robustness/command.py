"""`sdxl bench robustness RUN`: load or damage a service, and check conditions.

RUN is load, overload, leavers, soak, fuzz or all. It starts `sdxl serve` here with a double of
SDXL's full size (eval/service/double.py); fuzz uses the embedded models, with text.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eval.measuring.options import add_option
from eval.robustness import runs
from eval.robustness.fuzz_run import fuzz
from eval.robustness.report import RunReport
from eval.service import double
from eval.service.client import local_service
from sdxl.arguments import Parser, check_positive
from sdxl.params import InvalidParams

LIGHT, HEAVY = 0.8, 1.5
"""shares of the service's capacity"""
CHEAP = (
    *("--max-steps", "2", "--max-n", "2", "--deadline-s", "8", "--max-deadline-s", "8"),
    *("--body-timeout-s", "5"),
)
SEVERAL = ("--replicas", "2", "--ingresses", "2")
RUNS: dict[str, Any] = {
    "load": partial(runs.load, share=LIGHT),
    "overload": partial(runs.load, share=HEAVY),
    "leavers": runs.leave,
    "soak": runs.soak,
    "fuzz": fuzz,
}


def main(argv: Sequence[str]) -> int:
    options = read_options(argv)
    holds = True
    for name in RUNS if options.run == "all" else (options.run,):
        report = run(name, options)
        report.write(Path(options.out))
        print(f"{report.name}\n{report}", flush=True)
        holds = holds and report.holds
    return 0 if holds else 1


def read_options(argv: Sequence[str]) -> Any:
    description = "Load or damage a service, and check it."
    parser = Parser(prog="sdxl bench robustness", description=description)
    parser.add_argument("run", metavar="RUN", help=f"all, or one of {', '.join(RUNS)}")
    add, plan = partial(add_option, parser), runs.RunPlan()
    add("--seconds", plan.seconds, "duration of each run")
    add("--count", plan.count, "leavers: clients; fuzz: requests")
    add("--first", plan.first, "fuzz: number of the first request")
    add("--seed", plan.seed, "of random choices")
    add("--kill-every-s", plan.kill_every_s, "soak: seconds between two kills; 0 = none", "S")
    add("--rate", plan.rate, "soak: clients a second")
    add("--speed", 1.0, "of the double; 1 = an H200")
    add("--rows", 4, "rows of the double's largest call")
    add("--out", "out/robustness", "reports", "DIR")
    options = parser.parse_args(argv)
    if options.run not in (*RUNS, "all"):
        raise InvalidParams("run", options.run, f"must be all, or one of {', '.join(RUNS)}")
    check_positive(options, "seconds", "count", "rate")
    return options


def run(name: str, options: Any) -> RunReport:
    plan = runs.RunPlan(**{field: getattr(options, field) for field in vars(runs.RunPlan())})
    with (
        tempfile.TemporaryDirectory() as scratch,
        local_service(flags_of(name, options, Path(scratch))) as url,
    ):
        report: RunReport = asyncio.run(RUNS[name](url, plan))
        return report


def flags_of(name: str, options: Any, scratch: Path) -> list[str]:
    results = ["--results-dir", str(scratch / "results")]
    if name == "fuzz":
        return [*CHEAP, *results, "--sdapi", "--batches-dir", str(scratch / "batches")]
    model = double.write(scratch / "sdxl-double", double.Settings(options.speed, options.rows))
    flags = ["--model", str(model), "--backend", double.BACKEND, "--llm", "none"]
    return [*flags, *(SEVERAL if name == "soak" else ()), *results]
