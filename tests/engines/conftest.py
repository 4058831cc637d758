"""Engines for tests: tiny exports, and folders of plans that the TensorRT double can run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.folders.export_folder import ExportFolder
from tests.engines.tiny_export import write_export


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is looked for, or left, in the home of whoever runs the tests."""
    home = tmp_path / "home"
    monkeypatch.setenv("SDXL_HOME", str(home))
    return home


@pytest.fixture
def tiny(tmp_path: Path) -> ExportFolder:
    return write_export(tmp_path / "tiny")
