"""Rows of a job whose last steps a refiner takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engines
from sdxl.images import read_parameters, to_pixels
from sdxl.params import GenerationParams
from sdxl.provenance import Provenance
from serve.batch.batch_spec import BatchFailed
from serve.batch.job import FILE
from serve.batch.renderers import LocalRenderer
from tests.sdxl.refiners import write_refiner
from tests.serve.batch.drawers import Editor, jsonl, make, pictures
from tests.serve.test_edits import pixels

SIZE: dict[str, Any] = {"width": 128, "height": 128}


@pytest.mark.slow
def test_rows_with_deep_steps_and_a_refiner_are_as_from_the_pipeline(tmp_path: Path) -> None:
    folder = write_refiner(tmp_path / "small")
    model = engines.load("mini", "torch", refiner=str(folder))
    row = {"prompt": "a ring", "seed": 7, "steps": 5, **SIZE}
    flags = "--refiner", str(folder), "--refiner-switch-at", "0.6", "--deep-steps", "0,2"
    source, out = jsonl(tmp_path, [row]), tmp_path / "out"
    assert make(source, out, *flags, load=lambda: LocalRenderer(model, Provenance())) == 0
    (file,) = pictures(out).values()
    params = GenerationParams(
        "a ring", seed=7, steps=5, deep_steps=(0, 2), refiner="small", refiner_switch_at=0.6, **SIZE
    )
    (result,) = model.generate([params])
    assert result.image is not None and result.deep_steps == 3
    distance = np.abs(pixels(file).astype(int) - to_pixels(result.image)).max()
    assert distance <= 2, f"differs by {distance} of 255"
    assert read_parameters(file)["refiner"] == "small"


def test_a_changed_refiner_stops_the_resumed_job(tmp_path: Path) -> None:
    folder = write_refiner(tmp_path / "small")
    source, out = jsonl(tmp_path, [{"prompt": "a ring"}]), tmp_path / "out"
    flags = "--refiner", str(folder)
    assert make(source, out, *flags, load=Editor) == 0
    assert [*json.loads((out / FILE).read_text())["files"]] == ["refiner 'small'"]
    config = folder / "unet" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(BatchFailed, match="refiner 'small' has changed since the job began"):
        make(source, out, *flags, load=Editor)
