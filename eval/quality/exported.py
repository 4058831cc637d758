"""Exports that a measurement makes for itself, held against nothing."""

from __future__ import annotations

from pathlib import Path

from engines.folders.export_folder import ExportFolder
from onnx_export.calibration import calibration_prompts
from onnx_export.export_spec import ExportSpec
from onnx_export.exporter import Say, export, unchecked
from onnx_export.recipes import RECIPES
from sdxl.checkpoint import Checkpoint
from sdxl.specs import Cut


def exported(
    checkpoint: Checkpoint,
    precision: str,
    out: Path,
    cut: Cut = "reference",
    calibrated_on: int | None = None,
    say: Say = lambda _: None,
) -> ExportFolder:
    """An 8-bit one is calibrated on the usual prompts, or so many of them."""
    prompts: list[str] = []
    if recipe := RECIPES.get(precision):
        prompts = calibration_prompts(checkpoint, None, recipe)[:calibrated_on]
    spec = ExportSpec(checkpoint, precision, out, cut, prompts=tuple(prompts))
    return export(spec, unchecked, say)
