"""The real TensorRT-RTX builds our own graphs for an L40S, without a GPU.

A built plan does not prove that 8-bit kernels run: TensorRT chooses the kernels, and tensorrt-rtx
documents INT8 for weights alone. Only a timing on the GPU proves it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.folders.export_folder import ExportFolder
from engines.trt.build import build
from engines.trt.plan_worker import run_worker
from tests.engines.fake_builds import order_of
from tests.onnx_export.exports import Exports, export_tiny, write_tiny_inpainting

pytest.importorskip("tensorrt_rtx")
pytest.importorskip("polygraphy")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDXL_HOME", str(tmp_path / "home"))


def builds(export: ExportFolder, name: str, folder: Path) -> None:
    plan, order = folder / f"{name}.plan", order_of(export, folder, has_controlnets=True)
    run_worker(order.job(name, plan), folder / "log", lambda share: None)
    assert plan.stat().st_size > 0


@pytest.mark.long
def test_all_graphs_in_half_precision_build(exports: Exports, tmp_path: Path) -> None:
    export = exports("fp16")
    engines = build(order_of(export, tmp_path / "fp16", has_controlnets=True))
    assert set(engines.plans) == {*export.graphs, "unet_deep+control", "unet_shallow+control"}
    for name in engines.plans:
        engines.plan_bytes(name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["unet_deep", "unet_shallow"])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_both_unets_in_eight_bits_build(
    exports: Exports, tmp_path: Path, precision: str, name: str
) -> None:
    builds(exports(precision), name, tmp_path)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_small_unet_in_eight_bits_builds_with_residuals(
    tiny_exports: Exports, tmp_path: Path, precision: str
) -> None:
    builds(tiny_exports(precision), "unet_deep+control", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_small_inpainting_checkpoint_builds(tmp_path: Path, precision: str) -> None:
    """The UNet has nine input channels, and the masked picture's encoder is built too."""
    checkpoint = write_tiny_inpainting(tmp_path / "nine")
    export = export_tiny(checkpoint, tmp_path / "export", precision)
    for name in ("unet_deep", "unet_shallow", "vae_encoder"):
        builds(export, name, tmp_path)
