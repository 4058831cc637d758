"""The identity of the benchmark's task, and its picture sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval.quality import protocol, task
from eval.quality.frechet import Gaussian
from eval.quality.task import QualityTask, benchmark_task
from sdxl.checkpoint import find
from sdxl.params import InvalidParams


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    (tmp_path / "captions").write_text("caption\nA clock.\nA city.\n")
    (tmp_path / "clip").mkdir()
    for name in ("inception", "statistics", "clip/model.safetensors"):
        (tmp_path / name).write_text(name)
    nothing = Gaussian(torch.zeros(1), torch.zeros(1, 1))
    monkeypatch.setattr(task, "read_statistics", lambda *_: nothing)
    monkeypatch.setattr(task, "load_inception", lambda _: torch.nn.Identity())
    monkeypatch.setattr(task, "vit_b_32", lambda *_: None)
    monkeypatch.setattr(protocol, "SCHEDULER", {})
    names = ("captions", "inception", "clip", "statistics")
    return {name: str(tmp_path / name) for name in names}


def benchmark(files: dict[str, str | None], **given: int) -> QualityTask:
    return benchmark_task(find("mini"), given, 2, files, "cpu")


def test_another_clip_is_another_judge(files: dict[str, str | None], tmp_path: Path) -> None:
    before = benchmark(files).as_dict()
    assert benchmark(files).as_dict() == before
    (tmp_path / "clip" / "model.safetensors").write_text("other weights")
    assert benchmark(files).as_dict() != before


def test_pictures_must_be_square(files: dict[str, str | None]) -> None:
    with pytest.raises(
        InvalidParams, match="height must equal the width, 512: its scorers take squares"
    ):
        benchmark(files, width=512)
    assert benchmark(files, width=512, height=512).side == 512
