"""A checkpoint made for inpainting is the same on ONNX Runtime as in PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sdxl.params import GenerationParams
from sdxl.pipeline import WithPictures
from sdxl.source import SourceImage
from tests.onnx_export.conftest import PROMPTS
from tests.onnx_export.exports import export_tiny, painted_as_by_pytorch, write_tiny_inpainting


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_an_inpainting_checkpoint_s_graphs_paint_its_pictures(
    tmp_path: Path, precision: str
) -> None:
    checkpoint = write_tiny_inpainting(tmp_path / "nine")
    prompts = PROMPTS if precision == "int8" else ()
    folder = export_tiny(checkpoint, tmp_path / "export", precision, prompts=prompts)
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
