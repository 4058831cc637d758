"""Joins the embedded model's graphs, which ship with the code, and its weights in one folder. The
first picture then needs no export. It knows no runtime.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from engines.folders.export_folder import ExportError, ExportFolder
from engines.folders.places import export_place
from engines.folders.publishing import disk_errors, link_or_copy, locked, publish
from sdxl.checkpoint import MINI

GRAPHS = MINI.parent / "onnx"


def open_mini(
    digest: str | None = None, graphs: Path = GRAPHS, checkpoint: Path = MINI
) -> ExportFolder:
    """Open the embedded model's export in its default place, or make it there. `digest` is the
    expected digest of the weights."""
    shipped = ExportFolder.read(graphs)
    if digest not in (None, shipped.model_digest):
        raise ExportError(
            f"{graphs}: of the weights {shipped.model_digest[:12]}, expected {digest[:12]}; "
            "run make mini-onnx"
        )
    target = export_place(shipped.model, shipped.model_digest, shipped.precision, shipped.cut)
    try:
        return _open_same(shipped, target)
    except ExportError:
        with locked(target, waits=True):
            try:
                # Another process may have made the folder meanwhile.
                return _open_same(shipped, target)
            except ExportError:
                _make(shipped, checkpoint, target)
                return _open_same(shipped, target)


def _open_same(shipped: ExportFolder, target: Path) -> ExportFolder:
    """Open the folder; raise ExportError if its description differs from the shipped one."""
    export = ExportFolder.open(target, verify=True)
    if export.as_dict() != shipped.as_dict():
        raise ExportError(f"{target}: another export than {shipped.folder}")
    return export


def _make(shipped: ExportFolder, checkpoint: Path, target: Path) -> None:
    making = target.with_name(f".{target.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    try:
        with disk_errors(target):
            making.mkdir(parents=True)
            for graph in shipped.graphs.values():
                shutil.copyfile(shipped.folder / graph.file, making / graph.file)
            for name, data in shipped.data.items():
                source = shipped.folder / name if data.source is None else checkpoint / data.source
                link_or_copy(source, making / name)
            shipped.write(making)
            ExportFolder.open(making, verify=True)
        publish(making, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
