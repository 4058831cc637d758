"""Where the presets that were measured are kept: among the findings, and where asked beside the
model, which has them from there on. It does not know how they were found.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.folders.digests import model_digest
from sdxl import presets
from sdxl.checkpoint import Checkpoint
from sdxl.files import OutputError, prepare_folder, write_atomic
from sdxl.params import InvalidParams


def check_place(checkpoint: Checkpoint, out: Path) -> None:
    """That the model's folder takes a file, before hours are spent on what goes there."""
    try:
        prepare_folder(checkpoint.folder)
    except OutputError as error:
        needed = (
            f"needed a folder that can be written ({error.__cause__}); without the flag, copy "
            f"{out / presets.FILE} beside its model_index.json afterwards"
        )
        raise InvalidParams("store_presets", str(checkpoint.folder), needed) from error


def store_presets(
    chosen: presets.Presets,
    measured: Mapping[str, Any],
    checkpoint: Checkpoint,
    out: Path,
    *,
    is_beside_model: bool,
) -> list[Path]:
    """The files; each is of these weights alone, and refused in a folder of others."""
    data = presets.as_file(chosen, measured, model_digest(checkpoint))
    folders = [out, *([checkpoint.folder] if is_beside_model else [])]
    files = [folder / presets.FILE for folder in folders]
    for file in files:
        write_atomic(file, data)
    return files
