"""What a run in ONNX Runtime on a CPU says of a half-precision graph, and what it doesn't."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import onnxruntime

from engines.folders.export_folder import ExportFolder
from engines.onnxruntime_engine import session_options, threads

SMALLEST = "unet_shallow"
"""Its optimised copy is written to be read: that of a full-size Deep would be gigabytes."""
INSERTED = "InsertedPrecisionFreeCast"


def half_coverage(export: ExportFolder) -> str:
    casts = _inserted_casts(export)
    if not casts:
        return "ONNX Runtime ran the half-precision graphs in halves"
    return (
        f"ONNX Runtime put {casts} casts to float32 into {SMALLEST}: of half-precision graphs the "
        "figures cover how weights, inputs and outputs are rounded, not arithmetic in halves"
    )


def _inserted_casts(export: ExportFolder) -> int:
    with tempfile.TemporaryDirectory() as folder:
        options = session_options(threads())
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        path = export.folder / export.graphs[SMALLEST].file
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        model = onnx.load(options.optimized_model_filepath, load_external_data=False)
    return sum(node.name.startswith(INSERTED) for node in model.graph.node)
