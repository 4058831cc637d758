"""Folders and a pipeline that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

import engines
from sdxl.checkpoint import MINI
from sdxl.pipeline import Pipeline


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither read nor write the user's home."""
    monkeypatch.setenv("SDXL_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def tokenizer_folders() -> tuple[Path, Path]:
    """Return the folders of the embedded model's tokenizers: `tokenizer` pads with EOS,
    `tokenizer_2` with "!" (id 0)."""
    return MINI / "tokenizer", MINI / "tokenizer_2"


@pytest.fixture(scope="module")
def model(folder: Path) -> Pipeline:
    """Load the checkpoint in a module's own `folder`."""
    return engines.load(str(folder), "torch")
