"""The pictures that judge an export, and their size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engines.parity.pictures import PLAIN, subject_of
from sdxl.checkpoint import Checkpoint, find

MINI = find("mini")


def foreign(folder: Path, side: int) -> Checkpoint:
    """The configurations of a model for pictures of this side."""
    shutil.copytree(MINI.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = folder / "unet" / "config.json"
    sized = {**json.loads(config.read_text()), "sample_size": side // MINI.arch.vae_scale}
    config.unlink()
    config.write_text(json.dumps(sized))
    return Checkpoint("foreign", folder)


@pytest.mark.parametrize(
    ("own", "painted"), [(128, 128), (256, 256), (512, 512), (768, 384), (1024, 512)]
)
def test_a_large_model_is_painted_at_half_its_side_and_a_small_one_at_its_own(
    tmp_path: Path, own: int, painted: int
) -> None:
    assert subject_of(foreign(tmp_path / "model", own)).side == painted


def test_a_foreign_model_is_asked_for_plain_things_and_the_embedded_one_for_its_scenes(
    tmp_path: Path,
) -> None:
    assert subject_of(foreign(tmp_path / "model", 1024)).prompts == PLAIN
    own = subject_of(MINI, compared=3, scored=5)
    assert (len(own.prompts), own.compared, own.scored, own.side) == (5, 3, 5, None)
