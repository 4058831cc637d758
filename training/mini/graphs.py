"""Writes the embedded model's graphs that the repository ships: `python -m training.mini.graphs`.

Run it when the weights, the networks or the exporter change. The weights are not copied:
export.json names the checkpoint's files that contain them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from engines.folders.export_folder import ExportError, ExportFolder
from engines.folders.publishing import publish
from engines.folders.shipped import GRAPHS
from onnx_export.check import check
from onnx_export.export_spec import ExportSpec
from onnx_export.exporter import export
from sdxl.checkpoint import find


def main() -> None:
    with tempfile.TemporaryDirectory(dir=GRAPHS.parent, prefix=".onnx-") as work:
        order = ExportSpec(find("mini"), "fp32", Path(work) / "export")
        ship(export(order, check), Path(work) / "graphs")
        publish(Path(work) / "graphs", GRAPHS)
    print(f"{GRAPHS}: {sum(path.stat().st_size for path in GRAPHS.iterdir())} bytes")


def ship(folder: ExportFolder, target: Path) -> None:
    """Write the folder without its weights, which must all be in the checkpoint."""
    target.mkdir()
    for name, data in folder.data.items():
        if data.source is None:
            raise ExportError(f"{folder.folder / name}: not in the checkpoint; cannot be shipped")
    for graph in folder.graphs.values():
        shutil.copyfile(folder.folder / graph.file, target / graph.file)
    folder.write(target)


if __name__ == "__main__":
    main()
