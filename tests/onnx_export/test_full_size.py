"""What `make full-size` is made of, at a size that a test can afford."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engines import build_command
from engines.folders.targets import named_target
from engines.trt import one_plan
from engines.trt.flavours import check_buildable, flavour_named
from onnx_export import command as export_command
from onnx_export.full_size import (
    NOISE_BOUNDS,
    SERVED,
    FullSizeStep,
    StepCost,
    StepFailed,
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
    drawn, *others = steps(tmp_path, 1, ["fp16", "int8"], ["SM86"])
    for export, build, alone in zip(*[iter(others)] * 3, strict=True):
        assert str(drawn.folder) in export.arguments
        assert str(export.folder) in build.arguments and str(export.folder) in alone.arguments
        assert all(str(step.folder) in step.arguments for step in (export, build, alone))
    assert len({step.folder for step in others}) == 6, "each precision has its own"
    (fp16, *_), (int8, *_) = others[:3], others[3:]
    assert "--calibration-count" not in fp16.arguments and "--calibration-count" in int8.arguments


def test_its_plans_are_those_that_are_served_and_the_largest_for_others(tmp_path: Path) -> None:
    _, export, build, alone = steps(tmp_path, SERVED, ["int8"], ["SM120"])
    (command, *flags), (also, *others) = calls([export, build])
    assert (command, also) == ("export", "build")
    assert not export_command.build_parser().parse_args(flags).unchecked, "it is checked"
    order = build_command.build_parser().parse_args(others)
    target = named_target(order.gpu)
    assert order.max_batch == target.max_batch > 1
    check_buildable(flavour_named(order.backend), target, None)
    assert alone.arguments[:2] == ("-m", "engines.trt.one_plan")
    one = one_plan.build_parser().parse_args(alone.arguments[2:])
    assert (one.network, one.sm, one.max_batch) == ("unet_deep", "SM120", target.max_batch)


def test_plans_of_another_batch_are_not_taken_for_these(tmp_path: Path) -> None:
    one, four = (steps(tmp_path, batch, ["int8"], ["SM120"]) for batch in (1, 4))
    shared = {step.folder for step in one} & {step.folder for step in four}
    assert shared == {tmp_path / "model", tmp_path / "onnx-int8"}


def calls(steps: list[FullSizeStep]) -> list[list[str]]:
    """The arguments of `sdxl`."""
    assert all(step.arguments[:2] == ("-m", "sdxl.cli") for step in steps)
    return [[*step.arguments[2:]] for step in steps]


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


def test_a_failed_step_ends_it(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="export ended with 3"):
        measure(FullSizeStep("export", ["-c", "raise SystemExit(3)"], tmp_path / "none"))


@pytest.mark.slow
def test_an_export_is_held_by_the_noise_that_it_finds(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = tmp_path / "onnx"
    picture = ["--check-prompts", "1", "--check-steps", "2"]
    assert cli.main(["export", "--model", str(tiny.folder), "--out", str(onnx), *picture]) == 0
    assert re.search(r"unet_deep 0\.000\d, unet_shallow 0\.000\d; bound 0.001", noise_errors(onnx))
    monkeypatch.setitem(NOISE_BOUNDS, "fp32", 0.0)
    with pytest.raises(StepFailed, match="bound 0.0"):
        noise_errors(onnx)


def test_the_table_adds_up() -> None:
    text = table([StepCost("build", 62.0, 19 * 2**30, {"a.plan": 2**30, "b.plan": 2**29})])
    assert text.splitlines()[1].split() == ["build", "62", "19.0", "1.50"]
    assert sys.version_info >= (3, 11) and "a.plan" in text
