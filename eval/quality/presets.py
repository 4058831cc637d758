"""The presets low, medium and high of a model: the choice from a sweep's settings, and the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.folders.digests import model_digest
from eval.quality.pareto import QualitySetting, Tried, change, front
from sdxl import presets
from sdxl.checkpoint import Checkpoint
from sdxl.files import OutputError, prepare_folder, write_atomic
from sdxl.params import InvalidParams
from sdxl.presets import EXACT, MEASURED, Preset, Presets

PLAIN = QualitySetting()


def choose_presets(tried: Sequence[Tried]) -> Presets:
    """Choose from the settings within MLPerf's gates that no other beats in both speed and quality.
    Low is the fastest, high the nearest to the exact model; medium lies between. `tried[0]` is the
    exact model."""
    exact = tried[0]
    good = [each for each in tried if is_plain(each.setting) and change(each, exact).is_within]
    if not good:
        raise InvalidParams("grid", None, "must hold settings of the usual precision and scheduler")
    best = [each.setting for each in front([exact, *good]) if is_plain(each.setting)]
    three = best[0], best[(len(best) - 1) // 2], best[-1]
    chosen = {
        name: Preset(setting.steps, setting.cache_interval)
        for name, setting in zip(MEASURED, three, strict=True)
    }
    return {**chosen, **EXACT}


def is_plain(setting: QualitySetting) -> bool:
    """True if only steps and interval differ from the exact model's. `sdxl tune` makes presets of
    tuned plans, after stricter comparisons."""
    return setting == replace(PLAIN, steps=setting.steps, cache_interval=setting.cache_interval)


def check_writable(checkpoint: Checkpoint, out: Path) -> None:
    """Raise if the model's folder cannot be written, before hours of measuring."""
    try:
        prepare_folder(checkpoint.folder)
    except OutputError as error:
        needed = (
            f"must be a folder that can be written ({error.__cause__}); without the flag, copy "
            f"{out / presets.FILE} beside its model_index.json afterwards"
        )
        raise InvalidParams("store_presets", str(checkpoint.folder), needed) from error


def store_presets(
    chosen: Presets,
    measured: Mapping[str, Any],
    checkpoint: Checkpoint,
    out: Path,
    *,
    is_beside_model: bool,
) -> list[Path]:
    """Write the presets, with the weights' digest, so that other weights refuse them."""
    data = presets.as_file(chosen, measured, model_digest(checkpoint))
    folders = [out, *([checkpoint.folder] if is_beside_model else [])]
    files = [folder / presets.FILE for folder in folders]
    for file in files:
        write_atomic(file, data)
    return files
