"""`sdxl render` and the workers of service and batch put the same watermark into the same
picture."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import engines
from sdxl.params import InvalidParams
from sdxl.pipeline import Pipeline
from sdxl.provenance import AND_WATERMARK, C2PA, METADATA, OFF, Provenance
from sdxl.watermark import find, mark
from serve.batch.command import build_parser, read_order
from serve.orders import ImageOrder
from serve.render.command import main as render
from tests.serve.test_edits import pixels
from tests.serve.workers import order, picture_of, running

WATERMARKED = METADATA + AND_WATERMARK
PROMPT = "a red circle on a blue background"


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return engines.load("mini", "onnxruntime", is_deterministic=True)


def made_by_worker(pipeline: Pipeline, kind: str, asked: ImageOrder) -> bytes:
    with running(pipeline, provenance=Provenance(kind)) as worker:
        return asyncio.run(picture_of(worker, asked)).image


@pytest.mark.slow
def test_a_worker_marks_the_picture_without_changing_it_otherwise(pipeline: Pipeline) -> None:
    asked = order(PROMPT, seed=7)
    plain = pixels(made_by_worker(pipeline, OFF, asked))
    assert not find(plain).is_found
    marked = pixels(made_by_worker(pipeline, WATERMARKED, asked))
    assert np.array_equal(marked, mark(plain)) and find(marked).is_found


def test_render_marks_its_pictures(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    argv = [PROMPT, "--steps", "4", "--provenance", WATERMARKED, "--out", str(file)]
    assert render(argv) == 0
    assert find(pixels(file.read_bytes())).is_found


def test_a_reproducible_batch_takes_a_watermark_and_no_manifest(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(PROMPT)
    argv = [str(prompts), "--out", str(tmp_path / "out"), "--provenance"]
    assert read_order(build_parser().parse_args([*argv, WATERMARKED])).provenance.is_watermarked
    for kind in (C2PA, C2PA + AND_WATERMARK):
        with pytest.raises(InvalidParams, match="off, metadata, metadata\\+watermark"):
            read_order(build_parser().parse_args([*argv, kind]))
