"""Finds the engines below a folder, and chooses those that fit this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engines.folders.engine_folder import FILE, EngineError, EngineFolder
from engines.folders.targets import Target
from engines.trt.flavours import Flavour

PREFERENCE = ("int8", "fp8", "fp16", "fp32")


def engine_folders(root: Path) -> Iterator[EngineFolder | EngineError]:
    """Yield every folder with a manifest below `root`, or the error of reading it."""
    for manifest in sorted(root.rglob(FILE)):
        if manifest.parent.name.startswith("."):
            # The folder is still being made.
            continue
        try:
            yield EngineFolder.read(manifest.parent)
        except EngineError as error:
            yield error


def best_for(
    root: Path,
    flavour: Flavour,
    target: Target,
    digest: str,
    precision: str | None,
    *,
    takes_loras: bool = False,
    takes_unchecked: bool = False,
) -> EngineFolder | str:
    """Return the engines that run this model best, or why there are none. Engines with fused LoRAs
    compute another model."""
    folders = list(engine_folders(root))
    reasons = [str(folder) for folder in folders if isinstance(folder, EngineError)]
    fitting = []
    for folder in folders:
        if isinstance(folder, EngineError) or folder.backend != flavour.name:
            continue
        if folder.model_digest != digest or (folder.loras and not takes_loras):
            continue
        if precision not in (None, folder.precision):
            reasons.append(f"{folder.folder}: is {folder.precision}, expected {precision}")
        elif reason := folder.mismatch(target, flavour.version):
            reasons.append(f"{folder.folder}: {reason}")
        elif (unchecked := folder.unchecked) and not takes_unchecked:
            reasons.append(
                f"{folder.folder}: {unchecked}; run `sdxl build` of it on a {folder.gpu}, "
                "or --unchecked"
            )
        else:
            fitting.append(folder)
    if fitting:
        order = (target.precision, *PREFERENCE)
        return min(fitting, key=lambda folder: order.index(folder.precision))
    return "; ".join(reasons) or f"none were built for this model in {root}"
