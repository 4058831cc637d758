"""`sdxl build` and `sdxl engines` on the command line: exit codes and one clear line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engines import build_command
from engines.cuda import device
from engines.folders.engine_folder import EngineFolder
from engines.folders.export_folder import ExportFolder
from engines.folders.places import plans_root
from engines.parity.findings import CheckFailed
from engines.parity.proof import Proof
from engines.trt import build as build_module
from engines.trt.build import build
from engines.trt.engine_store import engine_folders
from sdxl.cli import main
from tests.engines.damages import flip_a_byte
from tests.engines.fake_builds import FakeWorker, order_of, proven
from tests.engines.tiny_export import DATA, write_export

RTX = ("--backend", "tensorrt-rtx", "--gpu", "l40s")


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    worker = FakeWorker()
    monkeypatch.setattr(build_module, "run_worker", worker)
    return worker


def test_a_build_is_listed_where_auto_looks(
    tiny: ExportFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--onnx", str(tiny.folder), *RTX]) == 0
    out = capsys.readouterr().out
    assert "unet_deep" in out and "fp32 for L40S, tensorrt-rtx" in out
    assert main(["engines"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["model", "precision", "gpu", "backend"]
    assert "not run: there is no L40S here" in out
    assert (
        "tiny dddddddddddd" in row and "8 pictures, PSNR in dB 51.25" in row and "clip_l" not in row
    )
    assert "not run: there is no L40S here" in row
    assert str(plans_root()) in row


def test_engines_as_json_are_an_object_a_line(
    tiny: ExportFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(order_of(tiny, tmp_path / "store" / "tiny" / "l40s"))
    assert main(["engines", str(tmp_path / "store"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"] == "L40S" and found["folder"].endswith("l40s")


def test_a_broken_manifest_is_reported_and_the_others_are_listed(
    tiny: ExportFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    for name in ("good", "bad"):
        build(order_of(tiny, store / "tiny" / name))
    (store / "tiny" / "bad" / "manifest.json").write_text("{}")
    assert main(["engines", str(store)]) == 1
    captured = capsys.readouterr()
    assert "good" in captured.out and "bad/manifest.json: not a manifest" in captured.err


def test_where_there_are_none_it_says_how_to_make_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines"]) == 0
    assert "no engines in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "onnx must be a folder of `sdxl export`, or give --model"),
        (
            ("--onnx", "X", "--gpu", "a100"),
            2,
            "gpu must be one of h100, h200, gh200, l40s, b200, local, got 'a100'",
        ),
        (
            ("--onnx", "X", *RTX, "--backend", "trt"),
            2,
            "backend must be one of tensorrt, tensorrt-rtx, got 'trt'",
        ),
        (("--onnx", "X", *RTX, "--max-batch", "9"), 2, "max-batch must be 1 to 4 on a L40S, got 9"),
        (("--onnx", "X", *RTX, "--max-batch", "0"), 2, "max-batch must be 1 to 4 on a L40S, got 0"),
        (("--onnx", "X", "--gpu", "h100"), 1, "found no NVIDIA GPU here, expected a H100"),
        (("--onnx", "X", "--gpu", "local"), 2, "there is no NVIDIA GPU here, got 'local'"),
        (("--onnx", "X", "--backend", "tensorrt-rtx", "--gpu", "h200"), 1, "H200 is SM90"),
        (("--onnx", "X", *RTX), 1, "X: no export.json there; expected a folder of `sdxl export`"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "local_target", lambda: None)
    assert main(["build", *arguments]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0], lines


def test_engines_with_a_lora_do_not_take_the_models_place(
    tmp_path: Path, worker: FakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    export = replace(write_export(tmp_path / "export"), loras=({"scale": 1.0},))
    export.write()
    command = ["build", "--onnx", str(export.folder), *RTX]
    assert main(command) == 2
    assert "out must be a folder" in capsys.readouterr().err
    assert not worker.built and not plans_root().exists()
    assert main([*command, "--out", str(tmp_path / "plans")]) == 0


def test_unchecked_keeps_plans_that_were_not_run_and_a_later_build_runs_them(
    tiny: ExportFolder,
    worker: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> Proof:
        raise CheckFailed("built engines are not the model: measured 0.7")

    monkeypatch.setattr(build_command, "run_built", refuse)
    command = ["build", "--onnx", str(tiny.folder), *RTX]
    assert main(command) == 1
    assert "not the model: measured 0.7" in capsys.readouterr().err
    assert not list(engine_folders(plans_root()))
    worker.built.clear()
    assert main([*command, "--unchecked"]) == 0
    assert "not run: built with --unchecked" in capsys.readouterr().out
    (made,) = engine_folders(plans_root())
    assert isinstance(made, EngineFolder) and made.unchecked == "not run: built with --unchecked"
    monkeypatch.setattr(build_command, "run_built", lambda made, *_: proven(made))
    assert main(command) == 0
    (made,) = engine_folders(plans_root())
    assert isinstance(made, EngineFolder) and made.unchecked is None
    assert not worker.built, "nothing is built twice"


@pytest.mark.parametrize("fused", [(), ({"scale": 1.0},)])
def test_loras_that_are_not_the_exports_are_refused_before_a_build(
    fused: tuple[dict[str, float], ...],
    tmp_path: Path,
    worker: FakeWorker,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export = replace(write_export(tmp_path / "export"), loras=fused)
    export.write()
    out = tmp_path / "plans"
    command = ["build", "--onnx", str(export.folder), *RTX, "--out", str(out)]
    assert main([*command, "--lora", "outlined"]) == 2
    assert "lora must be the export's LoRAs, in their order: " in capsys.readouterr().err
    assert not worker.built and not out.exists()


def test_weights_that_changed_since_the_export_are_found_before_a_build(
    tmp_path: Path, worker: FakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_export(tmp_path / "export").folder
    flip_a_byte(folder / DATA)
    assert main(["build", "--onnx", str(folder), *RTX]) == 1
    assert f"{DATA}: has sha256" in capsys.readouterr().err
    assert not worker.built and not plans_root().exists()


def test_a_smaller_batch_and_sparse_weights_are_recorded(
    tiny: ExportFolder, tmp_path: Path
) -> None:
    out = tmp_path / "small"
    flags = ("--max-batch", "2", "--sparse", "--out", str(out))
    assert main(["build", "--onnx", str(tiny.folder), *RTX, *flags]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["max_batch"], manifest["is_sparse"]) == (2, True)
