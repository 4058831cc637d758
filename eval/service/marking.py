"""The cost of marking pictures: one service for each kind of mark, measured in turns.

sdxl bench marking [--kinds c2pa+watermark …] [--seconds 10] [--rounds 7] [--save FILE]

In each round every service runs at full load for some seconds while the others idle. A share is
the rate divided by that of `off` in the same round. Other flags go to `sdxl serve`: with `--model
FOLDER --backend eval.service.double:load` pictures have the full size.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from eval.measuring.system_description import describe_system
from eval.measuring.timing import Spread, in_turns, ratio
from eval.service.client import local_service
from eval.service.load import WARM_S, connected, run_closed
from sdxl.arguments import Parser, whole
from sdxl.files import write_json
from sdxl.provenance import OFF, PROVENANCES

GOAL = 0.98


def measure(
    kinds: Sequence[str], seconds: float, rounds: int, flags: Sequence[str]
) -> dict[str, Any]:
    with ExitStack() as running:
        urls = {
            kind: running.enter_context(local_service(("--provenance", kind, *flags)))
            for kind in (OFF, *kinds)
        }
        for url in urls.values():
            rate(url, WARM_S)
        rates = in_turns({kind: partial(rate, url, seconds) for kind, url in urls.items()}, rounds)
    return {
        "system": describe_system(),
        "flags": list(flags),
        "seconds": seconds,
        "images/s": rates,
        "share of off": {kind: ratio(rates[kind], rates[OFF]) for kind in kinds},
    }


def rate(url: str, seconds: float) -> float:
    async def run() -> float:
        async with connected(url) as http:
            return (await run_closed(http, seconds)).rate

    return asyncio.run(run())


def table(report: dict[str, Any]) -> str:
    lines = [f"{'marks':<22}{'images/s':>10}  share of off: median (least to most)"]
    for kind, rates in report["images/s"].items():
        share = report["share of off"].get(kind)
        lines.append(
            f"{kind:<22}{Spread.of(rates).median:>10.2f}" + (f"  {share:.3f}" if share else "")
        )
    return "\n".join([*lines, f"\nthe goal is {GOAL}"])


def main(argv: Sequence[str] | None = None) -> int:
    options, flags = build_parser().parse_known_args(argv)
    report = measure(options.kinds, options.seconds, options.rounds, flags)
    if options.save:
        write_json(options.save, report, end="", default=asdict)
    print(table(report))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sdxl bench marking",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    marks = [kind for kind in PROVENANCES if kind != OFF]
    parser.add_argument("--kinds", nargs="+", choices=marks, default=marks[-1:])
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="duration of each run (%(default)s)"
    )
    parser.add_argument("--rounds", type=whole, default=7, help="rounds (%(default)s)")
    parser.add_argument("--save", type=Path, help="write all figures here, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
