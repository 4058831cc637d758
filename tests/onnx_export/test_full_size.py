"""What `make full-size` is made of, at a size that a test can afford."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from onnx_export.full_size import StepCost, StepFailed, measure, steps, table
from onnx_export.random_weights import SDXL_1_0, write_checkpoint
from sdxl.checkpoint import Checkpoint
from sdxl.files import OutputError
from sdxl.specs import SDXL_1_0 as ARCHITECTURE
from sdxl.specs import Architecture
from tests.onnx_export.exports import TINY


def test_the_configurations_are_sdxls() -> None:
    assert (
        Architecture.from_configs(
            *(SDXL_1_0[part] for part in ("unet", "vae", "text_encoder", "text_encoder_2"))
        )
        == ARCHITECTURE
    )


def test_random_weights_are_the_same_bytes_every_time(tiny: Checkpoint, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "again", TINY)
    assert Checkpoint("again", tmp_path / "again").digest == tiny.digest


def test_they_are_halves_that_keep_the_size_of_what_passes_through(tiny: Checkpoint) -> None:
    path = tiny.weight_files("unet")[0]
    with safe_open(path, framework="pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float16}  # noqa: SIM118
        norm = file.get_tensor("mid_block.resnets.0.conv1.weight").float().flatten(1).norm(dim=1)
    assert float(norm.mean()) == pytest.approx(1.0, abs=0.1)


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        write_checkpoint(tmp_path / "file" / "model", TINY)


def test_every_step_works_on_what_the_one_before_made(tmp_path: Path) -> None:
    (_, _, model), (_, export, onnx), (_, build, plans) = steps(tmp_path, 1)
    assert str(model) in export and str(onnx) in export
    assert str(onnx) in build and str(plans) in build


def test_a_step_is_timed_and_weighed(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    code = (
        "import sys; from pathlib import Path; held = bytearray(100_000_000); "
        "path = Path(sys.argv[1]); path.mkdir(); (path / 'x.plan').write_bytes(bytes(1000))"
    )
    cost = measure("step", ["-c", code, str(folder)], folder)
    assert cost.peak_bytes > 100_000_000 and cost.seconds > 0
    assert cost.files == {"x.plan": 1000}
    again = measure("step", ["-c", "raise SystemExit(1)"], folder)
    assert again.seconds == 0, "its folder is there"


def test_a_failed_step_ends_it(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="export ended with 3"):
        measure("export", ["-c", "raise SystemExit(3)"], tmp_path / "none")


def test_the_table_adds_up() -> None:
    text = table([StepCost("build", 62.0, 19 * 2**30, {"a.plan": 2**30, "b.plan": 2**29})])
    assert text.splitlines()[1].split() == ["build", "62", "19.0", "1.50"]
    assert sys.version_info >= (3, 11) and "a.plan" in text
