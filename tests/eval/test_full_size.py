"""The full-size run, rehearsed with the embedded model; its commands; and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines import build_command
from engines.folders.export_folder import ExportFolder
from engines.folders.targets import named_target
from engines.parity.calls import StepError
from engines.trt import one_plan
from engines.trt.flavours import check_buildable, flavour_named
from eval.robustness import full_size
from eval.robustness.full_size import (
    NOISE_BOUNDS,
    FullSizeRun,
    StepFailed,
    main,
    noise_errors,
    steps_of,
)
from onnx_export import command as export_command


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_step_passes_and_runs_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--out", str(tmp_path), "--model", "mini", "--side", "128", "--small-side", "128"]
    argv += ["--precision", "fp16", "--skip", "build"]
    assert main(argv) == 0
    steps = json.loads((tmp_path / "full-size.json").read_text())["steps"]
    assert len(steps) == 7 and steps["export, fp16"]["facts"]["noise"]["unet_deep"] > 0
    capsys.readouterr()
    assert main(argv) == 0
    assert capsys.readouterr().out.count("done before") == len(steps)


def fail_once(run: FullSizeRun) -> dict[str, str]:
    marker = run.out / "failed"
    if not marker.exists():
        marker.touch()
        raise StepFailed("no memory")
    return {}


def test_only_a_failed_step_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(full_size, "steps_of", lambda _: {"a": lambda _: {}, "b": fail_once})
    argv = ["--out", str(tmp_path), "--model", "mini"]
    assert [main(argv), main(argv)] == [1, 0]
    captured = capsys.readouterr()
    assert "full-size: no memory" in captured.err and captured.out.count("done before") == 1


def test_a_run_of_other_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(full_size, "steps_of", lambda _: {"one": lambda _: {}})
    for flags in (["--model", "mini"], ["--side", "128"], ["--small-side", "128"]):
        out = tmp_path / flags[0]
        assert main(["--out", str(out), *flags]) == 0
        assert main(["--out", str(out)]) == 1, flags
        assert f"has {flags[0][2:].replace('-', '_')} " in capsys.readouterr().err


def test_plans_are_those_of_the_served_gpu_and_the_largest_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(full_size, "run_python", lambda *arguments: commands.append(arguments))
    monkeypatch.setattr(full_size, "noise_errors", lambda _: {})
    run = FullSizeRun(tmp_path, "", 1024, 256, ["int8"])
    steps = steps_of(run)
    for name in ("export, int8", "build, int8"):
        steps[name](run)
    (_, _, _, *exported), (_, _, _, *built), (_, module, *alone) = commands
    order = export_command.build_parser().parse_args(exported)
    assert not order.unchecked and order.check_size == 512 and order.calibration_size == 256
    order = build_command.build_parser().parse_args(built)
    target = named_target(order.gpu)
    assert order.max_batch == target.max_batch > 1
    check_buildable(flavour_named(order.backend), target, None)
    one = one_plan.build_parser().parse_args(alone)
    assert module == "engines.trt.one_plan"
    assert (one.network, one.sm, one.max_batch) == ("unet_deep", "SM120", target.max_batch)
    assert order.onnx == exported[exported.index("--out") + 1] == str(one.onnx)


def test_an_export_whose_noise_is_beyond_its_bound_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = NOISE_BOUNDS["int8"]
    errors = {"unet_deep": 0.9 * bound, "unet_shallow": 0.5 * bound}
    steps = [asdict(StepError(name, 0.0, error)) for name, error in errors.items()]
    folder = SimpleNamespace(precision="int8", parity={"step_errors": steps})
    monkeypatch.setattr(ExportFolder, "read", lambda _: folder)
    assert noise_errors(Path()) == pytest.approx(errors)
    steps[0]["noise"] = 1.1 * bound
    with pytest.raises(StepFailed, match=f"int8: noise, .*unet_deep .*bound {bound}"):
        noise_errors(Path())
