"""`sdxl bench h200`: every measurement on one H200, in one command of ten minutes.

Sections run in order of importance within the time budget. The report is written after every
figure; rerun the same command to repeat failed and missing sections. A section that fails is
recorded and does not stop the others. Without a GPU only --dry-run works: the embedded model at
tiny sizes, to test every path that a CPU can take.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.measuring.options import add_option
from sdxl.arguments import Parser
from sdxl.files import prepare_folder, write_json
from sdxl.params import InvalidParams

if TYPE_CHECKING:
    from eval.h200.bench import Bench

FILE = "h200.json"
BUDGET_S = 560.0
SHOWN = 400
"""the most characters of a figure on the terminal"""


@dataclass(frozen=True)
class Section:
    """`needs_s`: on a GPU the section is skipped if less time is left."""

    module: str
    function: str
    needs_s: float

    def begin(self, bench: Bench) -> Iterator[tuple[str, Any]]:
        module = importlib.import_module(self.module)
        figures: Iterator[tuple[str, Any]] = getattr(module, self.function)(bench)
        return figures


SECTIONS = {
    "peers": Section("eval.h200.speed", "peers", 150),
    "stages": Section("eval.h200.speed", "stages", 30),
    "profile": Section("eval.h200.proof", "profile", 20),
    "agreement": Section("eval.h200.proof", "agreement", 40),
    "pictures": Section("eval.h200.proof", "pictures", 15),
    "requests": Section("eval.h200.proof", "requests", 20),
    "batching": Section("eval.h200.speed", "batching", 30),
    "options": Section("eval.h200.speed", "options", 45),
    "peers_compiled": Section("eval.h200.speed", "peers_compiled", 150),
    "peers_1": Section("eval.h200.speed", "peers_1", 30),
    "peers_16": Section("eval.h200.speed", "peers_16", 100),
}


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    for name in options.sections:
        if name not in SECTIONS:
            raise InvalidParams("sections", name, f"must be one of {', '.join(SECTIONS)}")
    import torch

    if not torch.cuda.is_available() and not options.is_dry:
        raise InvalidParams("dry-run", False, "must be set: there is no NVIDIA GPU here")
    from eval.h200.bench import Bench

    prepare_folder(options.out)
    until_s = time.perf_counter() + options.time_budget
    bench = Bench(options.out, until_s, options.is_dry, options.precisions)
    report = run(bench, options)
    failed = [name for name in options.sections if "error" in report["sections"][name]]
    print(f"{report_file(options)}: {len(options.sections)} sections, failed: {failed or 'none'}")
    return 1 if failed else 0


def build_parser() -> Parser:
    parser = Parser(prog="sdxl bench h200", description="Measure everything on one H200.")
    add = partial(add_option, parser)
    add("--out", Path("out/h200"), "results", "DIR")
    add("--report", None, "the report (default: DIR/h200.json)", "FILE", type=Path)
    add("--time-budget", BUDGET_S, "time limit", "SECONDS")
    add("--sections", list(SECTIONS), "what to measure", "NAME")
    add("--precisions", [], "of fp16, fp8, int8 (default: all)", type=str)
    add("--dry-run", False, "the embedded model, tiny sizes", dest="is_dry")
    return parser


def run(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    from eval.measuring.system_description import describe_system

    sections = earlier(report_file(options), bench.is_dry)
    report: dict[str, Any] = {
        "system": describe_system(),
        "is_dry": bench.is_dry,
        "budget_s": options.time_budget,
        "sections": sections,
    }
    for name in options.sections:
        if is_finished(sections.get(name, {})):
            print(f"{name}: kept from an earlier run", flush=True)
            continue
        section = SECTIONS[name]
        if not bench.is_dry and bench.left_s < section.needs_s:
            why = f"{bench.left_s:.0f} s left, needs {section.needs_s:.0f}"
            # Figures of an earlier run stay.
            sections.setdefault(name, {})["passed over"] = why
            save(report, report_file(options))
            continue
        figures: dict[str, Any] = {}
        sections[name] = figures
        began_s = time.perf_counter()
        try:
            for key, value in section.begin(bench):
                figures[key] = value
                print(f"{name}, {key}: {shown(value)}", flush=True)
                save(report, report_file(options))
        except Exception as error:
            # Recorded, and reported at the end: time on the machine is too expensive to stop.
            figures["error"] = f"{type(error).__name__}: {error}"
            figures["traceback"] = traceback.format_exc()
        figures["seconds"] = time.perf_counter() - began_s
        save(report, report_file(options))
        print(f"{name}: {figures['seconds']:.0f} s {figures.get('error', '')}", flush=True)
    return report


def report_file(options: argparse.Namespace) -> Path:
    file: Path = options.report or options.out / FILE
    return file


def earlier(report: Path, is_dry: bool) -> dict[str, dict[str, Any]]:
    """The sections of earlier runs."""
    if not report.exists():
        return {}
    stored = json.loads(report.read_text(encoding="utf-8"))
    if stored["is_dry"] != is_dry:
        needed = "must be another file: dry and real runs do not mix"
        raise InvalidParams("report", str(report), needed)
    sections: dict[str, dict[str, Any]] = stored["sections"]
    return sections


def is_finished(section: Mapping[str, Any]) -> bool:
    return "seconds" in section and "error" not in section


def shown(value: object) -> str:
    """The value as one line of JSON."""
    text = json.dumps(value, default=asdict)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def save(report: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, report, end="", default=asdict)
