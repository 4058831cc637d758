"""The graphs in the repository equal the exporter's current graphs of the embedded model."""

from __future__ import annotations

import pytest

from engines.folders.export_folder import ExportFolder
from engines.folders.shipped import GRAPHS
from sdxl.checkpoint import find
from tests.onnx_export.exports import Exports

MAX_BYTES = 1_000_000


def test_the_shipped_graphs_are_of_these_weights() -> None:
    assert ExportFolder.read(GRAPHS).model_digest == find("mini").digest, "needed: make mini-onnx"


@pytest.mark.long
def test_exporting_again_gives_the_same_bytes(exports: Exports) -> None:
    """The second export runs in another process."""
    again, shipped = exports("fp32"), ExportFolder.read(GRAPHS)
    for name, graph in again.graphs.items():
        ours = (again.folder / graph.file).read_bytes()
        assert (GRAPHS / graph.file).read_bytes() == ours, f"{name}; needed: make mini-onnx"
    assert shipped.model_digest == again.model_digest, "needed: make mini-onnx"
    assert shipped.data == again.data


def test_the_shipped_graphs_are_small_and_checked() -> None:
    size = sum(path.stat().st_size for path in GRAPHS.iterdir())
    assert size <= MAX_BYTES, f"{size} bytes, at most {MAX_BYTES}"
    findings = ExportFolder.read(GRAPHS).parity["findings"]
    assert len(findings) == 13
