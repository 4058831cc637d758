"""`sdxl eval --sweep`: quality against speed for combinations of precision, interval, cut,
scheduler and steps, and for tuned plans.

Every setting makes pictures of the same captions and seeds and is compared with the exact model:
float32, every step deep. Each setting has its own folder, so an interrupted sweep can resume. On a
CPU, speed is measured in this process's CPU time, which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from engines import ASKED_PRECISIONS
from engines.choice import UNAVAILABLE
from engines.folders.export_folder import PRECISIONS, ExportFolder
from engines.pytorch.torch_engine import EIGHT_BIT, load_torch
from eval.measuring.timing import cpu_s, wall_s
from eval.quality.evaluation import Evaluation, run_with_progress
from eval.quality.inputs import load_pipeline, read_task
from eval.quality.pareto import QualitySetting, Tried, table
from eval.quality.plot import plot_pareto
from eval.quality.presets import check_writable, choose_presets, is_plain, store_presets
from eval.quality.sources import Folder, Painted
from eval.quality.task import QualityTask
from sdxl.checkpoint import Checkpoint
from sdxl.engine import Engines
from sdxl.files import prepare_folder, write_atomic, write_json
from sdxl.params import GenerationParams, InvalidParams
from sdxl.pipeline import Pipeline
from sdxl.specs import CUTS, Cut

Grid = Mapping[str, Sequence[Any]]
EXACT = QualitySetting()
STEM = "quality"
USUAL: tuple[Grid, ...] = (
    {"steps": [10, 20, 30, 50], "cache_interval": [1, 2, 3]},
    {"scheduler": ["dpmpp_2m"], "steps": [10, 20], "cache_interval": [1, 2]},
    {"precision": ["fp16", "int8", "fp8"], "cache_interval": [1, 2]},
    {"cut": ["fresh_skips"], "cache_interval": [2, 3]},
)
"""Each grid is a product. A field that a grid does not name has the exact model's value."""


def run_sweep(options: argparse.Namespace) -> int:
    settings = read_settings(options.grid, options.tuned)
    task, checkpoint = read_task(options)
    task = replace(task, load=cache(task.load))
    root = Path(options.out or Path("out") / "sweep")
    prepare_folder(root)
    if options.stores_presets:
        check_writable(checkpoint, root)
    load = cache(partial(load_engines, checkpoint, options, root))
    settings = drop_unloadable(settings, load)
    last_plain = [setting for setting in settings if is_plain(setting)][-1]
    tried: list[Tried] = []
    for setting in settings:
        print(f"{len(tried) + 1} of {len(settings)}: {setting}", flush=True)
        pipeline = Pipeline(checkpoint, load(setting.precision, setting.cut))
        tried.append(evaluate(setting, task, pipeline, root, options.bootstrap))
        # Write after every setting, so that an interrupted sweep has a report.
        write_report(tried, task, root)
        if setting == last_plain:
            # Only plain settings become presets. Store them now: a later setting may fail.
            chosen = choose_presets(tried)
            measured = {"task": task.name, "pictures": len(task.captions)}
            is_beside = options.stores_presets
            files = store_presets(chosen, measured, checkpoint, root, is_beside_model=is_beside)
            described = ", ".join(f"{name} {each.describe()}" for name, each in chosen.items())
            for file in files:
                print(f"{file}: {described}")
    print(table(tried))
    return 0


def read_settings(grid: str | None, tuned: str | None = None) -> list[QualitySetting]:
    """The exact model first, then every other setting once."""
    grids = USUAL if grid is None else read_grids(Path(grid))
    settings = [EXACT]
    try:
        for each in grids:
            for values in itertools.product(*each.values()):
                settings.append(QualitySetting(**dict(zip(each, values, strict=True))))
    except TypeError as error:
        raise InvalidParams("grid", grid, f"must have known settings ({error})") from error
    settings += read_tuned_plans(Path(tuned)) if tuned else []
    for setting in settings:
        check_setting(setting)
    return list(dict.fromkeys(settings))


def check_setting(setting: QualitySetting) -> None:
    """Raise for a setting that this machine cannot measure, before the sweep begins."""
    setting.apply_to(GenerationParams())
    is_cuda = torch.cuda.is_available()
    for field, value, allowed in (
        ("precision", setting.precision, ASKED_PRECISIONS if is_cuda else PRECISIONS),
        ("cut", setting.cut, CUTS),
    ):
        if value not in allowed:
            raise InvalidParams.unknown(field, value, allowed)
    if is_cuda and setting.precision in EIGHT_BIT and setting.cut != EXACT.cut:
        needed = f"must be {EXACT.cut}, the only one on a GPU in {setting.precision}"
        raise InvalidParams("cut", setting.cut, needed)


def drop_unloadable(
    settings: Sequence[QualitySetting], load: Callable[[str, Cut], Engines]
) -> list[QualitySetting]:
    """Remove the 8-bit settings whose engines the GPU cannot load. A CPU's are made later."""
    precisions = dict.fromkeys(setting.precision for setting in settings)
    missing = set()
    for precision in precisions if torch.cuda.is_available() else ():
        try:
            if precision in EIGHT_BIT:
                load(precision, EXACT.cut)
        except UNAVAILABLE as error:
            missing.add(precision)
            print(f"{precision} is left out: {error}", flush=True)
    return [setting for setting in settings if setting.precision not in missing]


def read_tuned_plans(path: Path) -> list[QualitySetting]:
    """The tuned plans in a report of `sdxl tune`."""
    try:
        plans = [each["plan"] for each in json.loads(path.read_text(encoding="utf-8"))["verdicts"]]
        return [
            QualitySetting(**plan["course"], deep_steps=tuple(plan["deep_steps"])) for plan in plans
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        needed = f"must be the tuning.json of `sdxl tune` ({error})"
        raise InvalidParams("tuned", str(path), needed) from error


def read_grids(path: Path) -> list[Grid]:
    needed = 'must hold JSON such as [{"precision": ["fp32", "int8"], "cache_interval": [1, 2]}]'
    try:
        grids = json.loads(path.read_text(encoding="utf-8"))
        return [
            {
                n: [tuple(v) if isinstance(v, list) else v for v in values]
                for n, values in grid.items()
            }
            for grid in grids
        ]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InvalidParams("grid", str(path), f"{needed} ({error})") from error


def evaluate(
    setting: QualitySetting, task: QualityTask, pipeline: Pipeline, root: Path, rounds: int
) -> Tried:
    folder = root / setting.slug
    exact = None if setting == EXACT else Folder(root / EXACT.slug / "pictures", task)
    evaluation = Evaluation(
        task,
        Painted(pipeline, [setting.apply_to(request) for request in task.requests]),
        folder,
        exact,
        folder / "pictures",
        wall_s if torch.cuda.is_available() else cpu_s,
    )
    scores = run_with_progress(evaluation, rounds)
    assert scores.images_per_s is not None, "a sweep makes its pictures"
    return Tried(setting, scores.figures, scores.images_per_s, scores.resamples)


def load_engines(
    checkpoint: Checkpoint, options: argparse.Namespace, root: Path, precision: str, cut: Cut
) -> Engines:
    """On a GPU the service's engines of the precision; else ONNX Runtime on an export made here."""
    if torch.cuda.is_available():
        if precision not in EIGHT_BIT:
            return load_torch(checkpoint, precision=precision, cut=cut)
        return load_pipeline(options, precision).engines
    from engines.folders.shipped import open_mini
    from engines.onnxruntime_engine import load_onnxruntime

    if (options.model, precision, cut) == ("mini", "fp32", "reference"):
        return load_onnxruntime(open_mini(checkpoint.digest))
    out = root / "exports" / f"{precision}-{cut}"
    prepare_folder(out.parent)
    return load_onnxruntime(export_unchecked(checkpoint, precision, out, cut))


def export_unchecked(
    checkpoint: Checkpoint,
    precision: str,
    out: Path,
    cut: Cut = "reference",
    calibration_prompts: int | None = None,
) -> ExportFolder:
    """Export without the comparison to PyTorch. 8-bit exports are calibrated on the usual prompts,
    or the first `calibration_prompts` of them."""
    from onnx_export import calibration
    from onnx_export.export_spec import ExportSpec
    from onnx_export.exporter import export, unchecked
    from onnx_export.recipes import RECIPES

    prompts: list[str] = []
    if recipe := RECIPES.get(precision):
        prompts = calibration.calibration_prompts(checkpoint, None, recipe)[:calibration_prompts]
    spec = ExportSpec(checkpoint, precision, out, cut, prompts=tuple(prompts))
    return export(spec, unchecked)


def write_report(tried: Sequence[Tried], task: QualityTask, root: Path) -> None:
    report = {"task": task.as_dict(), "note": task.note, "settings": [t.as_dict() for t in tried]}
    write_json(root / f"{STEM}.json", report)
    write_atomic(root / f"{STEM}.md", page(tried, task).encode())
    plot_pareto(tried, root / f"{STEM}.png")


def page(tried: Sequence[Tried], task: QualityTask) -> str:
    exact = tried[0].figures
    spreads = [
        f"{name} {exact[name].interval.high / exact[name].value - 1:.1%}"
        for name in ("FID", "CLIP")
    ]
    cpu = "the process's own CPU time, over its threads"
    clock = "the wall clock" if torch.cuda.is_available() else cpu
    return f"""# Quality against speed

![{task.name}: images/s against the change of FID and of CLIP]({STEM}.png)

{task.name}, {len(task.captions)} pictures a setting, by `sdxl eval --sweep`. {task.note}.

Changes are from the first row, the exact model, on the same captions and seeds; a star marks what
no other setting beats in both speed and the worse of the two changes, measured in MLPerf's gates
(FID 2%, CLIP 0.2%). Another draw of as many pictures would move the exact model's own figures by up
to {" and ".join(spreads)} (95%). Speed is by {clock}.
PSNR, SSIM and distance compare with the first row's pictures, also for other schedulers.

{table(tried)}
"""
