"""Checkpoints with other inputs, guidance as an embedding or a masked picture, are the same on ONNX
Runtime as in PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engines.trt.build import build
from onnx_export.random_weights import write_checkpoint
from sdxl.checkpoint import Checkpoint
from sdxl.params import GenerationParams
from sdxl.pipeline import WithPictures
from sdxl.source import SourceImage
from tests.conftest import psnr
from tests.engines.fake_builds import order_of
from tests.onnx_export.exports import (
    TINY,
    export_tiny,
    painted_as_by_pytorch,
    write_tiny_inpainting,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("models") / "lcm"
    write_checkpoint(folder, {**TINY, "unet": {**TINY["unet"], "time_cond_proj_dim": 12}})
    return Checkpoint("lcm", folder)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_guidance_is_read_from_its_embedding(
    checkpoint: Checkpoint, tmp_path: Path, precision: str
) -> None:
    folder = export_tiny(checkpoint, tmp_path / "export", precision)
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
def test_tensorrt_builds_graphs_that_read_guidance(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """This needs no GPU, because nothing is run."""
    pytest.importorskip("tensorrt_rtx")
    folder = export_tiny(checkpoint, tmp_path / "export", "fp16")
    plans = build(order_of(folder, tmp_path / "l40s")).plans
    assert set(plans) == set(folder.graphs)
    for name in ("unet_deep", "unet_shallow"):
        assert all("condition" in profile.ranges for profile in plans[name].profiles), name


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_masked_picture_is_read(tmp_path: Path, precision: str) -> None:
    checkpoint = write_tiny_inpainting(tmp_path / "nine")
    folder = export_tiny(checkpoint, tmp_path / "export", precision)
    assert folder.graphs["unet_deep"].spec.inputs[0].dims[1] == 9
    text = GenerationParams("a red circle", steps=4, cache_interval=2, seed=3, width=32, height=32)
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    mask = Image.new("L", (32, 32), 0)
    mask.paste(255, (8, 8, 20, 24))
    source = SourceImage(Image.fromarray(noise), mask)
    asked: list[GenerationParams | WithPictures] = [
        text,
        WithPictures(text.for_edit(has_mask=True), source),
    ]
    painted_as_by_pytorch(checkpoint, folder, asked)
