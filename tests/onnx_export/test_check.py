"""The check accepts the right model, refuses others, and prints measured and required values."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.folders.export_folder import SCALE, ExportFolder, further_file
from engines.parity.calls import StepError
from engines.parity.findings import STEP_BOUNDS, CheckFailed, Finding, median_psnr, psnr, worst_psnr
from engines.parity.pictures import LEAST_STEPS, PLAIN, Subject, subject_of
from onnx_export.check import GRAPH_BOUNDS, SCATTER_SHARE, _Run, row_by_row
from onnx_export.export_spec import ExportSpec
from sdxl.checkpoint import Checkpoint, find
from tests.engines.tiny_export import sign
from tests.onnx_export.exports import Exports, Lines, checked


def run_of(folder: ExportFolder, checkpoint: Checkpoint) -> _Run:
    order = ExportSpec(checkpoint, folder.precision, folder.folder)
    return _Run(folder, order, subject_of(checkpoint))


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "fp8"])
def test_the_embedded_models_exports_are_the_model(precision: str, exports: Exports) -> None:
    """A difference raises an error."""
    parity = checked(exports(precision), find("mini"), compared=2, scored=32, steps=20)
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


def test_figures_are_printed_beside_their_bounds_and_the_errors_of_steps_are_kept(
    tiny_export: ExportFolder, tiny: Checkpoint
) -> None:
    said: Lines = []
    parity = checked(tiny_export, tiny, said.append)
    lines = [line for line in said if "measured" in line]
    assert len(lines) == 12 and sum("required at" in line for line in lines) == 9, lines
    assert [line for line in lines if "expected at 2 steps" in line]
    assert parity["painted"] == {"pictures": 1, "steps": 2, "side": 32, "interval": 2}
    errors = [StepError(**error) for error in parity["step_errors"]]
    assert [error.network for error in errors] == ["unet_deep", "unet_shallow"]
    for error in errors:
        assert 0 <= error.picture < STEP_BOUNDS["fp32"] and 0 <= error.noise < STEP_BOUNDS["fp32"]


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
    sign(other, path.name)
    with pytest.raises(CheckFailed, match=r"unet_\w+, fp32 +measured .*, required at most 0.0001"):
        checked(ExportFolder.read(other), tiny)


def test_an_8_bit_graph_may_differ_as_its_rounding_differs_from_itself(
    tiny_exports: Exports, tiny: Checkpoint
) -> None:
    folder = tiny_exports("int8")
    names = [tensor.name for tensor in folder.graphs["unet_deep"].spec.outputs]
    expected = [{name: torch.ones(4) for name in names}]
    found = [{name: torch.full((4,), 1.1) for name in names}]
    compared = partial(run_of(folder, tiny).compared, "unet_deep", found, expected)
    assert [compared(scatter).holds for scatter in (0.0, 0.06, 0.07)] == [False, False, True]


@pytest.mark.long
def test_the_embedded_models_rounding_hardly_differs_from_itself(exports: Exports) -> None:
    run = run_of(exports("int8"), find("mini"))
    rounded = run.torch("unet")
    scatter = run.scatter(rounded, run.outputs(rounded, row_by_row))
    assert {*scatter} == {"unet_deep", "unet_shallow"}
    assert all(0 < each < GRAPH_BOUNDS["int8"] / SCATTER_SHARE for each in scatter.values()), (
        scatter
    )


@pytest.mark.long
def test_pytorchs_own_8_bits_have_findings_of_their_own(exports: Exports, tmp_path: Path) -> None:
    """No graph uses the numbers of the further layers, so they do not change the check of
    graphs."""
    mini = find("mini")
    folder = ExportFolder.read(shutil.copytree(exports("int8").folder, tmp_path / "int8"))
    in_torch = checked(folder, mini, scored=0)["torch"]
    assert not in_torch["note"]
    assert [Finding(**finding).holds for finding in in_torch["findings"]] == [True, True]
    further = folder.folder / further_file("unet")
    numbers = load_file(further)
    scales = {n: 4 * value for n, value in numbers.items() if n.endswith(SCALE)}
    further.unlink()
    save_file({**numbers, **scales}, further)
    sign(folder.folder, further.name)
    wrong = checked(ExportFolder.read(folder.folder), mini, scored=0)["torch"]
    assert "in PyTorch: picture expected at 2 steps" in wrong["note"]


@pytest.mark.parametrize(("bounds", "bound"), [("STEP_BOUNDS", 0.0), ("PICTURE_BOUNDS", 121.0)])
def test_errors_of_steps_and_of_pictures_decide(
    bounds: str,
    bound: float,
    tiny_export: ExportFolder,
    tiny: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"onnx_export.check.{bounds}", {"fp32": bound})
    with pytest.raises(CheckFailed, match="required at"):
        checked(tiny_export, tiny)


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
    expected = [{"noise": torch.zeros(4)} for _ in range(3)]
    found = [dict(each) for each in expected]
    found[place] = {"noise": torch.tensor([0.0, math.nan, 0.0, 0.0])}
    assert not run_of(tiny_export, tiny).compared("unet_shallow", found, expected).holds
