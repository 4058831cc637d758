"""`sdxl export`: exports a checkpoint to ONNX graphs, or checks an existing export."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from engines.folders.export_folder import PRECISIONS, ExportFolder
from engines.folders.places import export_place
from onnx_export.export_spec import (
    CACHE_INTERVAL,
    GUIDANCE,
    CalibrationSettings,
    ExportSpec,
    usual_settings,
)
from onnx_export.recipes import RECIPES
from sdxl.arguments import MODEL, VAE, Parser, add_lora_flag, add_option, model_with, number, whole
from sdxl.files import prepare_folder
from sdxl.params import MAX_STEPS, GenerationParams, InvalidParams
from sdxl.specs import CUTS

if TYPE_CHECKING:
    from engines.parity.pictures import Subject
    from sdxl.checkpoint import Checkpoint

MINUTES = 20.0
CALIBRATION = (
    "calibration",
    "annotations",
    "calibration-count",
    "calibration-guidance",
    "calibration-negative",
    "calibration-interval",
    "calibration-size",
)


class PackageMissing(RuntimeError):
    """A package for exports is not installed."""


def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    check_choices(options)
    check_packages(options)
    if options.check is not None:
        return check_folder(options)
    order = read_order(options)
    # Imported late, so that an error in a flag does not wait for PyTorch.
    from onnx_export.check import check
    from onnx_export.exporter import export, unchecked

    subject = read_subject(options, order.checkpoint)
    folder = export(
        order,
        unchecked
        if options.unchecked
        else lambda made, order, say: check(made, order, say, subject),
        # Hours may pass between two lines, which a file or a pipe would buffer.
        partial(print, flush=True),
    )
    print(f"{folder.folder}: {folder.precision} of {folder.model}, {folder.cut} cut")
    return 0


def build_parser() -> Parser:
    parser = Parser(prog="sdxl export", description="Export a model to ONNX graphs.")
    add = partial(add_option, parser)
    add("--model", "mini", MODEL)
    add("--vae", None, VAE, "FILE")
    add("--precision", "fp32", ", ".join(PRECISIONS))
    add("--cut", CUTS[0], f"features that deep steps cache: {', '.join(CUTS)}")
    add("--out", None, "where to put it (default: where engines look for it)", "DIR")
    text = "fuse this LoRA into the weights first: a file, its folder, or one of the embedded "
    add_lora_flag(parser, text + "model's by name")
    text = "for int8 and fp8: a prompt a line, or MLPerf's list (default: included prompts)"
    add("--calibration", None, text, "FILE")
    add("--annotations", None, "COCO's annotations, if --calibration is a list of ids", "FILE")
    text = "prompts of the calibration (default: the recipe's 32)"
    add("--calibration-count", None, text, "N", type=whole)
    text = f"guidance of the calibration (default {GUIDANCE:g})"
    add("--calibration-guidance", None, text, "X", type=number)
    text = "negative prompt of the calibration (default: MLPerf's)"
    add("--calibration-negative", None, text, "TEXT")
    text = f"cache interval of the pictures that will be served (default {CACHE_INTERVAL})"
    add("--calibration-interval", None, text, "N", type=whole)
    text = "side of the calibration's pictures (default: the model's own)"
    add("--calibration-size", None, text, "PIXELS", type=whole)
    add("--force", False, "also export unchanged parts")
    add("--unchecked", False, "publish without the check; serving it takes --unchecked too")
    add("--check-prompts", None, "pictures of the check", "N", type=whole)
    add("--check-steps", None, "steps of each picture of the check", "N", type=whole)
    text = "side of the check's pictures (default: half of the model's own; all of it up to 512)"
    add("--check-size", None, text, "PIXELS", type=whole)
    text = "time limit of the check, in minutes; at least one picture is painted"
    add("--check-minutes", MINUTES, text, "N")
    add("--check", None, "export nothing; check this export of the model again", "DIR")
    return parser


def check_choices(options: argparse.Namespace) -> None:
    for field, allowed in (("precision", PRECISIONS), ("cut", CUTS)):
        value = getattr(options, field)
        if value not in allowed:
            raise InvalidParams.unknown(field, value, allowed)
    for field in CALIBRATION:
        value = getattr(options, field.replace("-", "_"))
        if value is not None and options.precision not in RECIPES:
            raise InvalidParams(
                field, value, f"cannot be used with {options.precision}, which is not calibrated"
            )
    if options.lora and not (options.out or options.check):
        raise InvalidParams("out", None, "must be given for an export with LoRAs")


def check_packages(options: argparse.Namespace) -> None:
    needed = {"onnxscript": True, "modelopt": options.precision in RECIPES}
    missing = [name for name, is_used in needed.items() if is_used and not find_spec(name)]
    if missing:
        raise PackageMissing(
            f"no {', '.join(missing)} here; run pip install 'sdxl-deepcache[export]'"
        )


def read_order(options: argparse.Namespace) -> ExportSpec:
    from engines.lora import LoraFile
    from onnx_export.calibration import calibration_prompts
    from sdxl.checkpoint import find

    loras = tuple(LoraFile.parse(text) for text in options.lora)
    checkpoint = find(model_with(options.model, options.vae))
    prompts: list[str] = []
    if options.precision in RECIPES:
        prompts = calibration_prompts(
            checkpoint,
            _path(options.calibration),
            RECIPES[options.precision],
            options.calibration_count,
            _path(options.annotations),
        )
    if options.out:
        out = Path(options.out)
    else:
        out = export_place(checkpoint.name, checkpoint.digest, options.precision, options.cut)
    prepare_folder(out.absolute().parent)
    return ExportSpec(
        checkpoint,
        options.precision,
        out,
        options.cut,
        loras,
        tuple(prompts),
        read_settings(options, checkpoint),
        options.force,
    )


def read_settings(options: argparse.Namespace, checkpoint: Checkpoint) -> CalibrationSettings:
    given = {
        "guidance": options.calibration_guidance,
        "negative_prompt": options.calibration_negative,
        "cache_interval": options.calibration_interval,
        "side": checkpoint.sizes.resolve("calibration-size", options.calibration_size)
        if options.calibration_size
        else None,
    }
    settings = replace(
        usual_settings(checkpoint), **{n: v for n, v in given.items() if v is not None}
    )
    # Refuse wrong values before anything is loaded.
    GenerationParams(
        "a picture",
        guidance=settings.guidance,
        negative_prompt=settings.negative_prompt,
        cache_interval=settings.cache_interval,
    )
    return settings


def read_subject(options: argparse.Namespace, checkpoint: Checkpoint) -> Subject:
    """Return the pictures of the check. The embedded model is fast and needs no time limit."""
    from engines.parity.pictures import subject_of
    from sdxl.checkpoint import MINI

    subject = subject_of(checkpoint)
    count, steps, side = options.check_prompts, options.check_steps, options.check_size
    if count is not None:
        if not 1 <= count <= len(subject.prompts):
            raise InvalidParams("check-prompts", count, f"must be 1 to {len(subject.prompts)}")
        subject = replace(subject, compared=count)
    if steps is not None:
        if not 1 <= steps <= MAX_STEPS:
            raise InvalidParams("check-steps", steps, f"must be 1 to {MAX_STEPS}")
        subject = replace(subject, steps=steps)
    if side is not None:
        subject = replace(subject, side=checkpoint.sizes.resolve("check-size", side))
    if checkpoint.folder != MINI:
        subject = replace(subject, budget_s=60 * options.check_minutes)
    return subject


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def check_folder(options: argparse.Namespace) -> int:
    """Check an export again, against its model."""
    from engines.folders.export_folder import ExportError
    from engines.lora import LoraFile
    from onnx_export.check import check
    from sdxl.checkpoint import find

    export = ExportFolder.open(Path(options.check), verify=True)
    checkpoint = find(model_with(options.model, options.vae))
    loras = tuple(LoraFile.parse(text) for text in options.lora)
    if export.model_digest != checkpoint.digest:
        raise ExportError(
            f"{export.folder}: an export of {export.model} {export.model_digest[:12]}…; "
            f"found --model {checkpoint.name} {checkpoint.digest[:12]}…"
        )
    if [lora.as_dict() for lora in loras] != list(export.loras):
        raise ExportError(
            f"{export.folder}: has the LoRAs {list(export.loras)}; name them with --lora"
        )
    order = ExportSpec(checkpoint, export.precision, export.folder, export.cut, loras)
    parity = check(export, order, subject=read_subject(options, checkpoint))
    replace(export, parity=parity).write()
    return 0
