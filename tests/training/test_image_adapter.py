"""The embedded model's image adapter: its training, and the adapter in the package."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from engines import load
from engines.image_weights import read_image_adapter
from sdxl.catalogue import ENCODER
from sdxl.checkpoint import find
from sdxl.places import IP_ADAPTERS
from tests.training.conftest import short_plan
from training.mini.check import WEIGHTS
from training.mini.image_adapter import NAME, SIDE, TOKENS, train_image_adapter
from training.mini.image_check import paint_prompted, share_right, unseen_references, verdicts

FILE = f"{NAME}.safetensors"


def test_the_shipped_adapter_is_read_by_engines() -> None:
    assert read_image_adapter(IP_ADAPTERS / FILE, find("mini")).tokens == TOKENS


@pytest.mark.long
def test_pictures_show_what_references_show_that_training_never_saw() -> None:
    scenes, pictures = unseen_references(20)
    pipeline = load(backend="torch")
    with_it, without = (
        share_right(verdicts(paint_prompted(pipeline, pictures, strength), scenes))
        for strength in (1.0, 0.0)
    )
    assert with_it >= 0.8, f"{with_it:.2f} with the adapter"
    assert without <= 0.2, f"{without:.2f} without it"


def test_the_adapter_is_trained_from_the_weights_in_the_package(tmp_path: Path) -> None:
    plan, out = short_plan(image_seen=40, image_scenes=3), tmp_path / "out"
    train_image_adapter(plan, WEIGHTS, out, tmp_path, "cpu")
    read = read_image_adapter(out / FILE, find("mini"))
    assert read.tokens == TOKENS and read.encoder == out / ENCODER
    network = read.network(read.vision())
    assert all(torch.isfinite(each).all() for each in network(torch.zeros(1, 3, SIDE, SIDE)))
    usual = stat.S_IMODE((tmp_path / f"{NAME}.pt").stat().st_mode)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {usual}
