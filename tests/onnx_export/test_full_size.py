"""What `make full-size` is made of, at a size that a test can afford."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from onnx_export.full_size import (
    NOISE_BOUNDS,
    FullSizeStep,
    StepCost,
    StepFailed,
    is_held,
    measure,
    noise_errors,
    steps,
    table,
)
from onnx_export.random_weights import SDXL_1_0, write_checkpoint
from sdxl import cli
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
    drawn, *others = steps(tmp_path, 1, ["fp16", "int8"])
    for export, check, build in zip(*[iter(others)] * 3, strict=True):
        assert str(drawn.folder) in export.arguments and str(drawn.folder) in check.arguments
        assert str(export.folder) in check.arguments and str(export.folder) in build.arguments
        assert str(build.folder) in build.arguments
    folders = [step.folder for step in others if step.writes]
    assert len(set(folders)) == 4, "each precision has its own"
    (fp16, *_), (int8, *_) = others[:3], others[3:]
    assert "--calibration-count" not in fp16.arguments and "--calibration-count" in int8.arguments


CODE = (
    "import sys; from pathlib import Path; held = bytearray(100_000_000); "
    "path = Path(sys.argv[1]); path.mkdir(); (path / 'x.plan').write_bytes(bytes(1000))"
)


def test_a_step_is_timed_and_weighed(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    cost = measure(FullSizeStep("step", ["-c", CODE, str(folder)], folder))
    assert cost.peak_bytes > 100_000_000 and cost.seconds > 0
    assert cost.files == {"x.plan": 1000}
    again = FullSizeStep("step", ["-c", "raise SystemExit(1)"], folder)
    assert measure(again).seconds == 0, "its folder is there"
    check = FullSizeStep("check", ["-c", ""], folder, is_held, writes=False)
    assert measure(check).seconds > 0, "no check is in the folder"


def test_a_failed_step_ends_it(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="export ended with 3"):
        measure(FullSizeStep("export", ["-c", "raise SystemExit(3)"], tmp_path / "none"))


@pytest.mark.slow
def test_an_export_is_held_by_the_noise_that_it_finds(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = tmp_path / "onnx"
    flags = ["export", "--model", str(tiny.folder), "--out", str(onnx)]
    assert cli.main([*flags, "--unchecked"]) == 0 and not is_held(onnx)
    picture = ["--check-prompts", "1", "--check-steps", "2"]
    assert cli.main([*flags[:3], "--check", str(onnx), *picture]) == 0 and is_held(onnx)
    assert re.search(r"unet_deep 0\.000\d, unet_shallow 0\.000\d; bound 0.001", noise_errors(onnx))
    monkeypatch.setitem(NOISE_BOUNDS, "fp32", 0.0)
    with pytest.raises(StepFailed, match="bound 0.0"):
        noise_errors(onnx)


def test_the_table_adds_up() -> None:
    text = table([StepCost("build", 62.0, 19 * 2**30, {"a.plan": 2**30, "b.plan": 2**29})])
    assert text.splitlines()[1].split() == ["build", "62", "19.0", "1.50"]
    assert sys.version_info >= (3, 11) and "a.plan" in text
