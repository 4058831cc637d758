"""`sdxl tune` from flags to its report, and the flags that it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import engines
from eval.quality.task import embedded_task, mini_judges
from eval.tuning import tuning
from eval.tuning.command import build_parser
from eval.tuning.tuning import Tuning
from sdxl.checkpoint import find
from sdxl.params import InvalidParams
from sdxl.pipeline import Pipeline

COUNT = 4


@pytest.fixture
def quick_tuning(
    one_thread: None, mini: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Tuning]:
    monkeypatch.setattr(engines, "load", lambda *_, **__: mini)
    monkeypatch.setattr(tuning, "COST_IMAGES", 1)
    judges = mini_judges(8)
    task = replace(embedded_task({}, COUNT), load=lambda: judges)

    def make(*flags: str, is_late: bool = False) -> Tuning:
        usual = ("--steps", "4", "--prompts", "1", "--out", str(tmp_path))
        options, reports = build_parser().parse_args([*usual, *flags]), list[str]()
        return Tuning(options, task, find("mini"), lambda: is_late, reports.append)

    return make


@pytest.mark.long
def test_a_tuning_reports_tuned_plans_beside_plain_ones_and_resumes(
    quick_tuning: Callable[..., Tuning], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = quick_tuning().run()
    assert result is not None
    page = (tmp_path / "tuning.md").read_text()
    assert "| fp32 euler 4, exact | 1.000 |" in page and "interval 2" in page
    assert re.search(r"tuned plans? pay|No tuned plan", page)
    report = json.loads((tmp_path / "tuning.json").read_text())
    assert set(report["chosen"]) <= {"low", "medium", "high"}

    def refuse(*_: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr(Pipeline, "generate", refuse)
    monkeypatch.setattr(tuning, "measure_costs", refuse)
    again = quick_tuning().run()
    assert again is not None and again.as_dict()["checked"] == result.as_dict()["checked"]


def test_without_time_for_a_check_there_is_no_result(quick_tuning: Callable[..., Tuning]) -> None:
    assert quick_tuning(is_late=True).run() is None


def test_a_read_only_model_folder_is_refused_first(
    quick_tuning: Callable[..., Tuning], tmp_path: Path
) -> None:
    late = quick_tuning("--store-presets", is_late=True)
    (tmp_path / "file").touch()
    late.checkpoint = replace(late.checkpoint, folder=tmp_path / "file" / "model")
    with pytest.raises(
        InvalidParams, match="store_presets must be .*copy .*presets.json.*file/model"
    ):
        late.run()


def test_the_folder_of_another_tuning_is_refused(
    quick_tuning: Callable[..., Tuning], tmp_path: Path
) -> None:
    quick_tuning(is_late=True).run()
    with pytest.raises(InvalidParams, match="it holds another tuning"):
        quick_tuning("--prompts", "2", is_late=True).run()
