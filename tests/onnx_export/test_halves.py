"""A half precision export handles values that would overflow (tests/sdxl/test_halves.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.onnxruntime_engine import load_onnxruntime
from sdxl.checkpoint import Checkpoint
from sdxl.engine import call
from tests.onnx_export.exports import export_tiny, write_tiny
from tests.sdxl.test_halves import both_ways, changed, decibels, images, latents

LOUD = 2.0**18


def loud_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    checkpoint = write_tiny(folder)
    changed(checkpoint.part("vae"), LOUD, monkeypatch).save_pretrained(folder / "vae")
    return Checkpoint(folder.name, folder)


@pytest.mark.slow
def test_a_half_precision_export_of_an_overflowing_vae_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = loud_checkpoint(tmp_path / "loud", monkeypatch)
    vae = checkpoint.part("vae")
    assert not any(found.isfinite().all() for found in both_ways(vae, torch.float16))
    engines = load_onnxruntime(export_tiny(checkpoint, tmp_path / "export", "fp16"))
    needed = both_ways(vae)
    given = ({"image": images().half()}, "mean"), ({"latents": latents().half()}, "image")
    for ((inputs, name), network), exact in zip(
        zip(given, ("vae_encoder", "vae_decoder"), strict=True), needed, strict=True
    ):
        found = call(engines[network], checkpoint.arch, inputs)[name]
        assert found.dtype == torch.float16
        assert decibels(found.float(), exact) > 55
