"""`sdxl bench h200`: everything there is to measure on one H200, in one command of ten minutes.

The sections run in the order of their worth, each in what time is left; what each has found is
written after every figure, so that a kill loses nothing, and the same command goes on with what is
missing or failed. A section that fails says so in the report and leaves the others alone. On a
machine without a GPU only --dry-run goes: the embedded model, tiny sizes, every path that a CPU can
take, and no figure worth keeping.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdxl.arguments import Parser, number
from sdxl.files import prepare_folder, write_json
from sdxl.params import InvalidParams

if TYPE_CHECKING:
    from eval.h200.bench import Bench

FILE = "h200.json"
BUDGET_S = 560.0
SHOWN = 400
"""characters of a figure on the terminal"""


@dataclass(frozen=True)
class Section:
    """`needs_s`: with less time left on a GPU it is not begun."""

    module: str
    function: str
    needs_s: float
    is_usual: bool = True

    def begin(self, bench: Bench) -> Iterator[tuple[str, Any]]:
        import importlib

        measure: Callable[[Bench], Iterator[tuple[str, Any]]] = getattr(
            importlib.import_module(self.module), self.function
        )
        return measure(bench)


SECTIONS = {
    "peers": Section("eval.h200.speed", "peers", 150),
    "stages": Section("eval.h200.speed", "stages", 30),
    "profile": Section("eval.h200.proof", "profile", 20),
    "agreement": Section("eval.h200.proof", "agreement", 40),
    "pictures": Section("eval.h200.proof", "pictures", 15),
    "requests": Section("eval.h200.proof", "requests", 20),
    "batching": Section("eval.h200.speed", "batching", 30),
    "kernels": Section("eval.h200.speed", "kernels_timed", 20),
    "options": Section("eval.h200.speed", "options", 45),
    "peers_compiled": Section("eval.h200.speed", "peers_compiled", 150),
    "peers_1": Section("eval.h200.speed", "peers_1", 30),
    "peers_16": Section("eval.h200.speed", "peers_16", 100),
    "rtx": Section("eval.h200.rtx", "small", 60),
    "rtx_full": Section("eval.h200.rtx", "full", 300, is_usual=False),
}


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    for name in options.sections:
        if name not in SECTIONS:
            raise InvalidParams("sections", name, f"needed one of {', '.join(SECTIONS)}")
    import torch

    if not torch.cuda.is_available() and not options.is_dry:
        raise InvalidParams("dry-run", False, "no NVIDIA GPU here; needed --dry-run")
    from eval.h200.bench import Bench

    prepare_folder(options.out)
    until_s = time.perf_counter() + options.time_budget
    bench = Bench(options.out, until_s, options.is_dry, options.precisions)
    report = run(bench, options)
    failed = [name for name in options.sections if "error" in report["sections"][name]]
    print(f"{place_of(options)}: {len(options.sections)} sections, failed: {failed or 'none'}")
    return 1 if failed else 0


def build_parser() -> Parser:
    parser = Parser(prog="sdxl bench h200", description="Everything on one H200, in one command.")
    usual = [name for name, section in SECTIONS.items() if section.is_usual]
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/h200"), metavar="DIR", help="(default %(default)s)")
    add("--report", type=Path, metavar="FILE", help="apart from the model (default: DIR/h200.json)")
    add("--time-budget", type=number, default=BUDGET_S, metavar="SECONDS", help="%(default)s")
    add("--sections", nargs="+", default=usual, help=f"of {', '.join(SECTIONS)}")
    add("--precisions", nargs="+", default=[], help="of fp16, fp8, int8 (default: all)")
    add("--dry-run", action="store_true", dest="is_dry", help="the embedded model, tiny sizes")
    return parser


def run(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    from eval.measuring.system_description import describe_system

    sections = earlier(place_of(options), bench.is_dry)
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
            why = f"{bench.left_s:.0f} s left, needed {section.needs_s:.0f}"
            # What an earlier run found of it stays.
            sections.setdefault(name, {})["passed over"] = why
            save(report, place_of(options))
            continue
        found: dict[str, Any] = {}
        sections[name] = found
        began_s = time.perf_counter()
        try:
            for key, value in section.begin(bench):
                found[key] = value
                print(f"{name}, {key}: {shown(value)}", flush=True)
                save(report, place_of(options))
        except Exception as error:
            # Recorded and reported at the end: minutes on such a machine are too dear to stop.
            found["error"] = f"{type(error).__name__}: {error}"
            found["traceback"] = traceback.format_exc()
        found["seconds"] = time.perf_counter() - began_s
        save(report, place_of(options))
        print(f"{name}: {found['seconds']:.0f} s {found.get('error', '')}", flush=True)
    return report


def place_of(options: argparse.Namespace) -> Path:
    place: Path = options.report or options.out / FILE
    return place


def earlier(report: Path, is_dry: bool) -> dict[str, dict[str, Any]]:
    """The sections of runs before."""
    if not report.exists():
        return {}
    found = json.loads(report.read_text(encoding="utf-8"))
    if found["is_dry"] != is_dry:
        needed = "needed a place of its own: it holds a run of the other kind, dry or not"
        raise InvalidParams("report", str(report), needed)
    sections: dict[str, dict[str, Any]] = found["sections"]
    return sections


def is_finished(found: Mapping[str, Any]) -> bool:
    return "seconds" in found and "error" not in found


def shown(value: object) -> str:
    """In a line."""
    text = json.dumps(value, default=asdict)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def save(report: dict[str, Any], place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    write_json(place, report, end="", default=asdict)
