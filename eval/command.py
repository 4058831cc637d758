"""`sdxl eval`: FID, CLIP and the distance to the exact model's pictures, for pictures made here or
by a service, or stored in a folder. Flags are checked before a model is loaded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from eval.quality.inputs import EXACT, FEWEST, LOADED, add_benchmark_files
from sdxl.arguments import MODEL, Parser, add_generation_flags, add_option, refuse, whole
from sdxl.params import InvalidParams

if TYPE_CHECKING:
    from eval.quality.evaluation import Figure, Scores
    from eval.quality.task import QualityTask

ROUNDS = 200
COMMON_FLAGS = (
    *("--model", "--backend", "--precision", "--count", "--out", "--against", "--json"),
    *("--images", "--url", "--sweep", "--steps", "--scheduler", "--cache-interval"),
)
SOURCES = ("images", "url", "accuracy_log")
SWEPT = (
    *("steps", "scheduler", "cache_interval", "deep_steps"),
    *("guidance_interval", "guided_steps"),
)
"""flags of a picture that each setting of a sweep replaces"""
LABELS = {"psnr": "PSNR, dB", "ssim": "SSIM", "distance": "feature distance"}


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] == "fetch":
        from eval.quality import fetch

        return fetch.main(argv[1:])
    options = build_parser().parse_args(argv)
    check(options)
    if options.is_sweep:
        from eval.quality.sweep import run_sweep

        return run_sweep(options)
    # Imported after the flags are checked: PyTorch takes seconds to load.
    from eval.quality.evaluation import Evaluation, run_with_progress
    from eval.quality.inputs import read_exact, read_source, read_task

    task, checkpoint = read_task(options)
    source = read_source(options, task, checkpoint)
    out, save = Path(options.out or "out/eval"), Path(options.save) if options.save else None
    evaluation = Evaluation(task, source, out, read_exact(options, task), save)
    scores = run_with_progress(evaluation, options.bootstrap)
    report = {"task": task.as_dict(), "note": task.note, "source": source.describe()}
    report |= scores.as_dict()
    print(json.dumps(report) if options.is_json else table(task, scores))
    is_out = any(figure.holds is False for figure in scores.figures.values())
    return 1 if is_out else 0


def table(task: QualityTask, scores: Scores) -> str:
    lines = [
        f"{task.name}: {scores.pictures} pictures",
        task.note,
        "FID falls as the number of pictures grows: compare only runs with the same --count",
        "",
    ]
    lines += [row(LABELS.get(name, name), figure) for name, figure in scores.figures.items()]
    if scores.images_per_s is not None:
        lines.append(f"{'images/s':<26}{scores.images_per_s.median:10.2f}")
    return "\n".join(lines)


def row(label: str, figure: Figure) -> str:
    from eval.measuring.bootstrap import CONFIDENCE

    text = f"{label:<26}{figure.value:10.4f}  {CONFIDENCE:.0%}: {figure.interval.low:.4f} to "
    text += f"{figure.interval.high:.4f}"
    if figure.gate is None:
        return text
    verdict = "in" if figure.holds else "OUT OF"
    return f"{text}  {verdict} the range {figure.gate.low} to {figure.gate.high}"


def build_parser() -> Parser:
    from engines import BACKENDS, PRECISION
    from engines.flags import add_folder_flags

    parser = Parser(
        prog="sdxl eval",
        description="Measure the quality of a model's pictures.",
        common=COMMON_FLAGS,
    )
    add = partial(add_option, parser)
    add("--model", "mini", MODEL)
    add("--backend", "auto", ", ".join(BACKENDS))
    add("--precision", None, PRECISION)
    add_folder_flags(parser)
    add("--count", None, "pictures (default: all captions; mini 1000)", "N", type=whole)
    text = "results; an interrupted run resumes there (default out/eval)"
    add("--out", None, text, "DIR")
    add("--bootstrap", ROUNDS, "resamples of the intervals")
    text = "compare each picture with the exact fp32 model's, made here or in DIR"
    add("--against", None, text, "exact|DIR")
    add("--save", None, "save the pictures here", "DIR")
    add("--json", False, "print the results as one JSON object", dest="is_json")
    group = parser.add_argument_group("pictures that are not made here")
    add = partial(add_option, group)
    add("--images", None, "picture files, in the captions' order", "DIR")
    add("--url", None, "of a running service")
    add("--accuracy-log", None, "the log of `sdxl bench mlperf --accuracy`", "FILE")
    add_benchmark_files(parser)
    add = partial(add_option, parser.add_argument_group("quality against speed"))
    add("--sweep", False, "evaluate many settings", dest="is_sweep")
    text = "write the measured presets low, medium and high beside the model"
    add("--store-presets", False, text, dest="stores_presets")
    add("--grid", None, "the settings, as JSON; see docs/evaluation.md", "FILE")
    add("--tuned", None, "tuning.json of `sdxl tune`: adds its plans", "FILE")
    add_generation_flags(parser)
    return parser


def check(options: argparse.Namespace) -> None:
    from engines import ASKED_PRECISIONS

    if options.precision not in (None, *ASKED_PRECISIONS):
        raise InvalidParams.unknown("precision", options.precision, ASKED_PRECISIONS)
    if options.count is not None and options.count < FEWEST:
        raise InvalidParams("count", options.count, f"must be at least {FEWEST}")
    if options.bootstrap < 1:
        raise InvalidParams("bootstrap", options.bootstrap, "must be at least 1")
    given = ["--" + name.replace("_", "-") for name in SOURCES if getattr(options, name)]
    if len(given) > 1:
        raise InvalidParams("source", " and ".join(given), "must name one source of pictures")
    if options.is_sweep:
        names = (*SOURCES, "precision", "engines", "against", "save", "is_json", *SWEPT)
        needed = "cannot be used with --sweep, which has its own settings"
        refuse(build_parser(), options, names, needed)
    elif given:
        needed = f"cannot be used with {given[0]}, which loads no engines"
        refuse(build_parser(), options, LOADED, needed)
    for name in ("grid", "tuned", "stores_presets"):
        if getattr(options, name) and not options.is_sweep:
            field = name.replace("stores", "store")
            raise InvalidParams(field, getattr(options, name), "needs --sweep")
    for name in ("images", "against"):
        folder = getattr(options, name)
        if folder not in (None, EXACT) and not Path(folder).is_dir():
            raise InvalidParams(name, folder, "must be a folder of pictures")
