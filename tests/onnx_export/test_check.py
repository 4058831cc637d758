"""The check accepts the right model, refuses others, and prints measured and required values."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.folders.export_folder import SCALE, ExportFolder, further_file
from engines.parity.calls import StepError
from engines.parity.findings import STEP_BOUNDS, CheckFailed, Finding, median_psnr, psnr, worst_psnr
from engines.parity.pictures import LEAST_STEPS, PLAIN, Subject, subject_of
from onnx_export.check import GRAPH_BOUNDS, SCATTER_SHARE, _Run, check, row_by_row
from onnx_export.export_spec import ExportSpec
from onnx_export.exporter import export
from sdxl.checkpoint import Checkpoint, find
from tests.engines.tiny_export import sign_weights
from tests.onnx_export.exports import Exports, Lines

FEW = {"steps": 2, "compared": 1}


def run(folder: ExportFolder, checkpoint: Checkpoint, lines: Lines | None = None) -> object:
    order = ExportSpec(checkpoint, folder.precision, folder.folder, folder.cut)
    say = (lines if lines is not None else []).append
    return check(folder, order, say, replace(subject_of(checkpoint), **FEW))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "fp8"])
def test_the_embedded_models_exports_are_the_model(precision: str, exports: Exports) -> None:
    """The check is that of `sdxl export` with fewer pictures. A difference raises an error."""
    folder, mini = exports(precision), find("mini")
    subject = subject_of(mini, compared=2, scored=32)
    order = ExportSpec(mini, precision, folder.folder)
    parity = check(folder, order, lambda _: None, subject)
    findings, in_torch = parity["findings"], parity["torch"]
    assert len(in_torch["findings"]) == 3 * (precision in ("int8", "fp8")), in_torch
    assert not in_torch["note"]
    assert len(findings) == 13 + (precision in ("int8", "fp8"))
    whats = [finding["what"] for finding in findings]
    for alone in (f"{precision} alone", "interval 2 alone", f"{precision} and interval 2"):
        assert f"{alone}, PSNR to the exact model" in whats
    assert "the worst of these, PSNR in dB" in whats
    for finding in findings:
        assert Finding(**finding).holds, finding


def test_a_figure_is_printed_beside_its_bound(tiny_export: ExportFolder, tiny: Checkpoint) -> None:
    lines: Lines = []
    run(tiny_export, tiny, lines)
    lines = [line for line in lines if "measured" in line]
    assert len(lines) == 12 and sum("required at" in line for line in lines) == 9, lines
    assert [line for line in lines if "expected at 2 steps" in line]


def test_another_models_weights_are_refused(
    tiny_export: ExportFolder, tiny: Checkpoint, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_export.folder, other)
    path = other / "unet.safetensors"
    content = bytearray(path.read_bytes())
    content[-4000:] = bytes(4000)
    path.unlink()
    path.write_bytes(content)
    sign_weights(other, path.name)
    with pytest.raises(CheckFailed, match=r"unet_\w+, fp32 +measured .*, required at most 0.0001"):
        run(ExportFolder.read(other), tiny)


def test_an_8_bit_graph_may_differ_as_its_rounding_differs_from_itself(
    tiny_exports: Exports, tiny: Checkpoint
) -> None:
    folder = tiny_exports("int8")
    checked = _Run(folder, ExportSpec(tiny, "int8", folder.folder), subject_of(tiny))
    names = [tensor.name for tensor in folder.graphs["unet_deep"].spec.outputs]
    expected = [{name: torch.ones(4) for name in names}]
    found = [{name: torch.full((4,), 1.1) for name in names}]
    bounds = {scatter: checked.compared("unet_deep", found, expected, scatter) for scatter in SEEN}
    assert [finding.holds for finding in bounds.values()] == [False, False, True]


@pytest.mark.long
def test_the_embedded_models_rounding_hardly_differs_from_itself(exports: Exports) -> None:
    folder, mini = exports("int8"), find("mini")
    checked = _Run(folder, ExportSpec(mini, "int8", folder.folder), subject_of(mini))
    rounded = checked.torch("unet")
    scatter = checked.scatter(rounded, checked.outputs(rounded, row_by_row))
    assert {*scatter} == {"unet_deep", "unet_shallow"}
    assert all(0 < each < GRAPH_BOUNDS["int8"] / SCATTER_SHARE for each in scatter.values()), (
        scatter
    )


SEEN = (0.0, 0.06, 0.07)


@pytest.mark.long
def test_pytorchs_own_8_bits_have_findings_of_their_own(exports: Exports, tmp_path: Path) -> None:
    """No graph uses the numbers of the further layers, so they do not change the check of
    graphs."""
    mini = find("mini")
    folder = ExportFolder.read(shutil.copytree(exports("int8").folder, tmp_path / "int8"))
    in_torch = in_8_bits_in_torch(folder, mini)
    assert not in_torch["note"]
    assert [Finding(**finding).holds for finding in in_torch["findings"]] == [True, True]
    further = folder.folder / further_file("unet")
    numbers = load_file(further)
    scales = {n: 4 * value for n, value in numbers.items() if n.endswith(SCALE)}
    further.unlink()
    save_file({**numbers, **scales}, further)
    sign_weights(folder.folder, further.name)
    wrong = in_8_bits_in_torch(ExportFolder.read(folder.folder), mini)
    assert "in PyTorch: picture expected at 2 steps" in wrong["note"]


def in_8_bits_in_torch(folder: ExportFolder, checkpoint: Checkpoint) -> dict[str, Any]:
    order = ExportSpec(checkpoint, folder.precision, folder.folder, folder.cut)
    subject = replace(subject_of(checkpoint), scored=0, **FEW)  # type: ignore[arg-type]
    found: dict[str, Any] = check(folder, order, lambda _: None, subject)["torch"]
    return found


def test_a_graph_that_fails_is_not_published(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnx_export.check.GRAPH_BOUNDS", {"fp32": 0.0})
    subject = replace(subject_of(tiny), steps=2, compared=1)
    with pytest.raises(CheckFailed, match="required at most 0"):
        export(
            ExportSpec(tiny, "fp32", tmp_path / "export"),
            lambda made, order, say: check(made, order, say, subject),
            lambda _: None,
        )
    assert not (tmp_path / "export").exists()


def test_pictures_and_the_error_of_every_step_are_kept(
    tiny_export: ExportFolder, tiny: Checkpoint
) -> None:
    parity = run(tiny_export, tiny)
    assert isinstance(parity, dict)
    assert parity["painted"] == {"pictures": 1, "steps": 2, "side": 32, "interval": 2}
    errors = [StepError(**error) for error in parity["step_errors"]]
    assert [error.network for error in errors] == ["unet_deep", "unet_shallow"]
    assert all(0 <= error.picture < STEP_BOUNDS["fp32"] for error in errors)
    assert all(0 <= error.noise < STEP_BOUNDS["fp32"] for error in errors)


@pytest.mark.parametrize("bounds", ["STEP_BOUNDS", "PICTURE_BOUNDS"])
def test_errors_of_steps_and_of_pictures_decide(
    bounds: str, tiny_export: ExportFolder, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"onnx_export.check.{bounds}", {"fp32": {"S": 0.0, "P": 121.0}[bounds[0]]})
    with pytest.raises(CheckFailed, match="required at"):
        run(tiny_export, tiny)


def test_a_slower_machine_paints_fewer_pictures_and_steps_but_never_none() -> None:
    whole = Subject(PLAIN, len(PLAIN), steps=20, budget_s=600.0)
    assert whole.fitted(0.1) == whole
    painted = [(s.compared, s.steps) for s in map(whole.fitted, (2.0, 10.0, 30.0, 1e6))]
    assert painted == [(4, 20), (1, 16), (1, 5), (1, LEAST_STEPS)]


def test_nan_is_outside_every_bound() -> None:
    assert not Finding("x", float("nan"), 1.0).holds
    assert not Finding("x", float("nan"), 1.0, is_least=True).holds


def test_psnr_of_known_pictures() -> None:
    black, white = torch.full((1, 3, 4, 4), -1.0), torch.full((1, 3, 4, 4), 1.0)
    assert psnr(black, white) == pytest.approx(0.0)
    assert psnr(black + 0.02, black) == pytest.approx(40.0, abs=1e-3)
    assert psnr(black, black) == 120.0
    assert math.isnan(psnr(black, black * math.nan))


def test_one_different_picture_does_not_fail_the_check_but_half_of_them_do() -> None:
    expected = torch.zeros(4, 3, 4, 4)
    near, other = torch.full((3, 4, 4), 0.02), torch.ones(3, 4, 4)
    one, half = torch.stack([near, other, near, near]), torch.stack([near, other, near, other])
    assert median_psnr(one, expected) == pytest.approx(40.0, abs=1e-3)
    for found, measure in ((half, median_psnr), (one, worst_psnr)):
        assert measure(found, expected) == pytest.approx(6.02, abs=1e-2)
    one[2, 0, 0, 0] = math.nan
    assert math.isnan(median_psnr(one, expected))
    assert math.isnan(worst_psnr(one, expected))


@pytest.mark.parametrize("place", range(3))
def test_a_single_nan_is_the_worst_error(
    place: int, tiny_export: ExportFolder, tiny: Checkpoint
) -> None:
    order = ExportSpec(tiny, tiny_export.precision, tiny_export.folder)
    comparing = _Run(tiny_export, order, subject_of(tiny))
    expected = [{"noise": torch.zeros(4)} for _ in range(3)]
    found = [dict(each) for each in expected]
    found[place] = {"noise": torch.tensor([0.0, math.nan, 0.0, 0.0])}
    assert not comparing.compared("unet_shallow", found, expected).holds
