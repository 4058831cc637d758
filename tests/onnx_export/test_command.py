"""`sdxl export` refuses bad requests in one line, before and after loading."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.folders.export_folder import ExportFolder
from onnx_export import command
from onnx_export.command import build_parser, main, read_order
from onnx_export.export_spec import CalibrationSettings
from sdxl import cli
from sdxl.checkpoint import Checkpoint
from sdxl.files import OutputError
from sdxl.specs import VAE
from tests.onnx_export.exports import export_tiny


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--precision int4", "precision must be one of fp32, fp16, int8, fp8, got 'int4'"),
        ("--cut deep", "cut must be one of reference, fresh_skips"),
        ("--lora no.safetensors --out x", "lora must be an existing file, got 'no.safetensors'"),
        ("--lora no.safetensors", "out must be given for an export with LoRAs"),
        ("--calibration a.txt", "calibration cannot be used with fp32, which is not calibrated"),
        ("--precision int8 --calibration gone.txt", "gone.txt'), got 'gone.txt'"),
        ("--calibration-count 4", "calibration-count cannot be used with fp32, which is not"),
        (
            "--precision fp8 --calibration-interval 0",
            "cache_interval must be a whole number from 1 to 1000, got 0",
        ),
    ],
)
def test_a_bad_request_is_one_line(
    flags: str, message: str, tmp_path: Path, refused_early: Callable[..., str]
) -> None:
    assert message in refused_early("export", *flags.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("precision", "needed"), [("fp32", "onnxscript"), ("int8", "onnxscript, modelopt")]
)
def test_only_packages_that_the_precision_needs_are_missed(
    precision: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(command.PackageMissing, match=f"^no {needed} here;"):
        command.check_packages(build_parser().parse_args(["--precision", precision]))


def test_an_unwritable_place_is_refused_first(tiny: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="out must be a folder that can be written, got .*file"):
        main(["--model", str(tiny.folder), "--out", str(tmp_path / "file" / "export")])


def test_an_export_says_where_it_is(
    tiny: Checkpoint, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tiny.folder), "--out", str(out), "--unchecked"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "nodes" in line] == [
        *("clip_l", "clip_g", "unet_prompt", "unet_deep", "unet_shallow", *VAE)
    ]
    assert lines[-1] == f"{out}: fp32 of tiny, reference cut"


def test_calibration_flags_reach_the_export(tiny: Checkpoint, out: Path) -> None:
    values = {"count": 2, "guidance": 3.0, "negative": "dull", "interval": 3, "size": 32}
    flags = [f"--calibration-{name}={value}" for name, value in values.items()]
    common = ["--model", str(tiny.folder), "--precision", "int8", "--out", str(out)]
    order = read_order(build_parser().parse_args([*common, *flags]))
    assert len(order.prompts) == 2 and order.settings == CalibrationSettings(3.0, "dull", 3, 32)


def test_an_export_is_written_where_engines_look_by_default(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDXL_HOME", str(tmp_path))
    assert main(["--model", str(tiny.folder), "--unchecked"]) == 0
    (place,) = (tmp_path / "onnx").glob("[!.]*")
    assert place.name == f"tiny-{tiny.digest[:12]}-fp32"


def test_a_folder_is_checked_again(
    tiny: Checkpoint, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_tiny(tiny, out)
    assert main(["--model", str(tiny.folder), "--check", str(out), "--check-steps", "2"]) == 0
    assert "unet_deep, fp32" in capsys.readouterr().out
    assert len(ExportFolder.open(out).parity["findings"]) == 13


def test_a_broken_export_is_one_line_that_names_it(
    tiny: Checkpoint, tiny_export: ExportFolder, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = tmp_path / "export"
    shutil.copytree(tiny_export.folder, folder)
    (folder / "clip_l.onnx").write_bytes(b"")
    command = ["export", "--model", str(tiny.folder), "--check", str(folder)]
    assert "clip_l.onnx: has sha256" in refused(*command, code=cli.FAILED)


def test_an_export_is_checked_against_its_own_model(
    tiny_export: ExportFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    from engines.folders.export_folder import ExportError

    with pytest.raises(ExportError, match=r"an export of tiny .*; found --model sdxl-mini"):
        main(["--check", str(tiny_export.folder)])
