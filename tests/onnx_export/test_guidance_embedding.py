"""A checkpoint that reads guidance as an embedding is the same on ONNX Runtime as in PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.trt.build import build
from onnx_export.random_weights import write_checkpoint
from sdxl.checkpoint import Checkpoint
from sdxl.params import GenerationParams
from tests.conftest import psnr
from tests.engines.fake_builds import order_of
from tests.onnx_export.conftest import PROMPTS
from tests.onnx_export.exports import TINY, export_tiny, painted_as_by_pytorch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("models") / "lcm"
    write_checkpoint(folder, {**TINY, "unet": {**TINY["unet"], "time_cond_proj_dim": 12}})
    return Checkpoint("lcm", folder)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_its_graphs_paint_its_pictures(
    checkpoint: Checkpoint, tmp_path: Path, precision: str
) -> None:
    prompts = PROMPTS if precision == "int8" else ()
    folder = export_tiny(checkpoint, tmp_path / "export", precision, prompts=prompts)
    named = {t.name: t.dims for name in folder.graphs for t in folder.graphs[name].spec.inputs}
    assert named["guidance_embedding"][1] == 12 and named["condition"][1] == 16
    usual = GenerationParams("a red circle", steps=8, seed=3, width=32, height=32)
    asked = [
        GenerationParams(**{**usual.as_dict(), "guidance": guidance, "cache_interval": interval})
        for guidance, interval in ((1.0, 1), (8.0, 2))
    ]
    plain, guided = (each.latents for each in painted_as_by_pytorch(checkpoint, folder, asked))
    assert plain is not None and guided is not None
    assert psnr(guided, plain) < 60, "guidance is read"


@pytest.mark.long
def test_tensorrt_builds_its_graphs(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """This needs no GPU, because nothing is run."""
    pytest.importorskip("tensorrt_rtx")
    folder = export_tiny(checkpoint, tmp_path / "export", "fp16")
    plans = build(order_of(folder, tmp_path / "l40s")).plans
    assert set(plans) == set(folder.graphs)
    for name in ("unet_deep", "unet_shallow"):
        assert all("condition" in profile.ranges for profile in plans[name].profiles), name
