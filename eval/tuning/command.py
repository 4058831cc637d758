"""`sdxl tune`: find which steps of a model should run the whole UNet, by scheduler and step count,
and whether such plans beat plain choices. Flags are checked before a model is loaded.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from eval.quality.inputs import FEWEST, add_benchmark_files
from sdxl.arguments import MODEL, Parser, add_option, number
from sdxl.params import PARAMETERS, InvalidParams
from sdxl.presets import MEASURED

BUDGETS = (0.35, 0.5, 0.75)
FEWEST_STEPS = 4


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    check(options)
    # Imported after the flags are checked: PyTorch takes seconds to load.
    from tqdm import tqdm

    from eval.quality.inputs import read_task
    from eval.tuning.report import summary
    from eval.tuning.tuning import Tuning

    until_s = time.perf_counter() + (options.seconds or math.inf)
    task, checkpoint = read_task(options)
    task = replace(task, load=cache(task.load))
    with tqdm(file=sys.stderr, unit="step", mininterval=1) as bar:

        def report(activity: str) -> None:
            bar.set_description_str(activity, refresh=False)
            bar.update()

        def is_late() -> bool:
            return time.perf_counter() > until_s

        result = Tuning(options, task, checkpoint, is_late, report).run()
    print(summary(result))
    return 0


def build_parser() -> Parser:
    from engines import BACKENDS
    from engines.flags import add_folder_flags

    description = "Find which steps should run the whole UNet; for text: `sdxl tune llm`."
    parser = Parser(prog="sdxl tune", description=description)
    add = partial(add_option, parser)
    add("--model", "mini", MODEL)
    add("--backend", "auto", ", ".join(BACKENDS))
    add_folder_flags(parser)
    add("--out", "out/tune", "results; an interrupted run resumes there", "DIR")
    add("--prompts", 8, "captions for the search")
    add("--check-prompts", 64, "other captions, to check plans on")
    add("--seconds", None, "time limit: no new trial begins after it", "S", type=number)
    most = f"the most cost for {', '.join(MEASURED)}, as shares of the exact model's"
    add("--budget", BUDGETS, most, "SHARE", dest="budgets", nargs=len(MEASURED))
    text = "write the presets low, medium and high beside the model"
    add("--store-presets", False, text, dest="stores_presets")
    text = "all combinations are tried; the first values are the exact model's"
    ways = parser.add_argument_group("samplings", text)
    add = partial(add_option, ways)
    add("--precision", ["fp32"], "precisions of the engines", dest="precisions")
    add("--scheduler", ["euler"], "schedulers", "NAME", dest="schedulers")
    add("--steps", [20], "steps of a picture", dest="step_counts")
    add("--guided-until", [1.0], "share of the steps, from the first, that is guided", "SHARE")
    ways.add_argument("--guidance", type=number, default=argparse.SUPPRESS, metavar="X")
    add_benchmark_files(parser)
    return parser


def check(options: argparse.Namespace) -> None:
    options.count = options.prompts + options.check_prompts
    for name, low in (("prompts", 1), ("check_prompts", FEWEST)):
        if (value := getattr(options, name)) < low:
            raise InvalidParams(name, value, f"must be at least {low}")
    for steps in options.step_counts:
        PARAMETERS["steps"].check(steps)
        if steps < FEWEST_STEPS:
            raise InvalidParams(
                "steps", steps, f"must be at least {FEWEST_STEPS}, so that some can be shallow"
            )
    for name in options.schedulers:
        PARAMETERS["scheduler"].check(name)
    for share in options.guided_until:
        if not 0 < share <= 1:
            raise InvalidParams("guided_until", share, "must be a share above 0, to 1")
    budgets = options.budgets
    is_rising = all(a < b for a, b in itertools.pairwise(budgets))
    if not (is_rising and budgets[0] > 0 and budgets[-1] <= 1):
        raise InvalidParams("budget", tuple(budgets), "must be rising shares above 0, to 1")
    if options.engines and len(options.precisions) > 1:
        raise InvalidParams("engines", options.engines, "needs one --precision, the folder's")
    if options.seconds is not None and options.seconds <= 0:
        raise InvalidParams("seconds", options.seconds, "must be more than 0")
