"""A checkpoint of SDXL's shape with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from onnx_export.random_weights import write_checkpoint
from sdxl.checkpoint import Checkpoint
from sdxl.files import OutputError
from tests.onnx_export.exports import TINY


def test_random_weights_are_the_same_bytes_every_time(tiny: Checkpoint, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "again", TINY)
    assert Checkpoint("again", tmp_path / "again").digest == tiny.digest


def test_weights_are_fp16_and_keep_the_size_of_activations(tiny: Checkpoint) -> None:
    path = tiny.weight_files("unet")[0]
    with safe_open(path, framework="pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float16}  # noqa: SIM118
        norm = file.get_tensor("mid_block.resnets.0.conv1.weight").float().flatten(1).norm(dim=1)
    assert float(norm.mean()) == pytest.approx(1.0, abs=0.1)


def test_a_failed_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        write_checkpoint(tmp_path / "file" / "model", TINY)
