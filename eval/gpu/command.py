"""`sdxl bench gpu`: this project's speed on one GPU, in one command of four minutes.

Sections run in order of importance within the time budget. The report is written after every
figure; rerun the same command to repeat failed and missing sections. A failed section is recorded
and does not stop the others. Without a GPU only --dry-run works: it runs the embedded model at tiny
sizes, to test every path that a CPU can take.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdxl.arguments import Parser, add_option
from sdxl.files import prepare_folder, write_json
from sdxl.params import InvalidParams

if TYPE_CHECKING:
    from eval.gpu.bench import Bench, Figures

FILE = "gpu.json"
BUDGET_S = 240.0
SHOWN = 400
"""the most characters that the terminal shows of a figure"""


SECTIONS = {
    "start": ("mixed", 60),
    "one_size": ("mixed", 30),
    "four_sizes": ("mixed", 15),
    "official_sizes": ("mixed", 15),
    "free_sizes": ("mixed", 15),
    "promises": ("mixed", 10),
    "one_client": ("mixed", 10),
    "profile": ("proof", 20),
    "requests": ("proof", 20),
    "pictures": ("proof", 15),
    "agreement": ("proof", 40),
    "loras": ("attached", 45),
    "controls": ("attached", 45),
}
"""the module of each section's function, and the seconds that it needs: on a GPU it is skipped if
less time is left"""
USUAL = [*SECTIONS][:8]


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    for name in options.sections:
        if name not in SECTIONS:
            raise InvalidParams.unknown("sections", name, SECTIONS)
    import torch

    if not torch.cuda.is_available() and not options.is_dry:
        raise InvalidParams("dry-run", False, "must be set: there is no NVIDIA GPU here")
    from eval.gpu.bench import Bench

    prepare_folder(options.out)
    until_s = time.perf_counter() + options.time_budget
    bench = Bench(options.out, until_s, options.is_dry, options.precisions, options.torch_options)
    report = run(bench, options)
    failed = [name for name in options.sections if "error" in report["sections"][name]]
    print(f"{options.out / FILE}: {len(options.sections)} sections, failed: {failed or 'none'}")
    return 1 if failed else 0


def build_parser() -> Parser:
    parser = Parser(prog="sdxl bench gpu", description="Measure one GPU.")
    add = partial(add_option, parser)
    add("--out", Path("out/gpu"), "results", "DIR")
    add("--time-budget", BUDGET_S, "time limit", "SECONDS")
    add("--sections", USUAL, f"what to measure: {', '.join(SECTIONS)}", "NAME")
    add("--torch-options", "", "options of the torch backend")
    add("--precisions", ["fp8"], "of fp16, fp8, int8")
    add("--dry-run", False, "the embedded model, tiny sizes", dest="is_dry")
    return parser


def run(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    from eval.measuring.system_description import describe_system

    file = options.out / FILE
    facts = {
        "system": describe_system(),
        "is_dry": bench.is_dry,
        "precisions": options.precisions,
        "torch_options": options.torch_options,
    }
    sections = read_sections(file, facts)
    report = {**facts, "budget_s": options.time_budget, "sections": sections}
    for name in options.sections:
        if is_finished(sections.get(name, {})):
            print(f"{name}: kept from an earlier run", flush=True)
            continue
        needs_s = SECTIONS[name][1]
        if not bench.is_dry and bench.left_s < needs_s:
            why = f"{bench.left_s:.0f} s left, needs {needs_s}"
            # Keep the figures of an earlier run.
            sections.setdefault(name, {})["passed over"] = why
            save(report, file)
            continue
        figures: dict[str, Any] = {}
        sections[name] = figures
        began_s = time.perf_counter()
        try:
            for key, value in begin(name, bench):
                figures[key] = value
                print(f"{name}, {key}: {shorten(value)}", flush=True)
                save(report, file)
        except Exception as error:
            # Time on the machine is too expensive to stop: report the error at the end.
            figures["error"] = f"{type(error).__name__}: {error}"
            figures["traceback"] = traceback.format_exc()
        figures["seconds"] = time.perf_counter() - began_s
        save(report, file)
        print(f"{name}: {figures['seconds']:.0f} s {figures.get('error', '')}", flush=True)
    return report


def begin(name: str, bench: Bench) -> Figures:
    module = importlib.import_module(f"eval.gpu.{SECTIONS[name][0]}")
    figures: Figures = getattr(module, name)(bench)
    return figures


def read_sections(file: Path, facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections of earlier runs, on this machine and with these flags."""
    if not file.exists():
        return {}
    stored = json.loads(file.read_text(encoding="utf-8"))
    if other := [name for name in facts if stored.get(name) != facts[name]]:
        needed = f"must be another folder: figures there have another {' and '.join(other)}"
        raise InvalidParams("out", str(file.parent), needed)
    sections: dict[str, dict[str, Any]] = stored["sections"]
    return sections


def is_finished(section: Mapping[str, Any]) -> bool:
    return "seconds" in section and "error" not in section


def shorten(value: object) -> str:
    text = json.dumps(value, default=asdict)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def save(report: dict[str, Any], file: Path) -> None:
    write_json(file, report, end="", default=asdict)
