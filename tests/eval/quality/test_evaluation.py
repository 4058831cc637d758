"""An evaluation works in chunks, resumes, and refuses the folder of another evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eval.quality import evaluation
from eval.quality.evaluation import Evaluation, Scores
from eval.quality.task import QualityTask
from sdxl.params import InvalidParams
from tests.eval.conftest import Noise

CHUNK = 8


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", CHUNK)


def run(task: QualityTask, source: Noise, folder: Path, exact: Noise | None = None) -> Scores:
    return Evaluation(task, source, folder, exact).run(rounds=20)


@pytest.fixture(scope="module")
def whole(task: QualityTask, tmp_path_factory: pytest.TempPathFactory) -> Scores:
    return run(task, Noise(), tmp_path_factory.mktemp("whole") / "out", Noise())


@pytest.mark.slow
def test_a_resumed_run_has_the_same_scores(
    task: QualityTask, tmp_path: Path, whole: Scores
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(task, Noise(fails_at=CHUNK + 1), tmp_path, Noise())
    again = Noise()
    scores = run(task, again, tmp_path, Noise())
    assert again.requested[0] == list(range(CHUNK, 2 * CHUNK)), "the first chunk was stored"
    for name, figure in whole.figures.items():
        # The last digits of a sum depend on the memory layout.
        assert scores.figures[name].value == pytest.approx(figure.value, rel=1e-7, abs=1e-7), name


def test_equal_pictures_have_the_best_figures_and_intervals_hold_them(whole: Scores) -> None:
    assert all(f.interval.low <= f.value <= f.interval.high for f in whole.figures.values())
    assert whole.figures["ssim"].value == pytest.approx(1)
    assert whole.figures["psnr"].value == 100
    assert whole.figures["distance"].value == pytest.approx(0, abs=1e-6)


def test_scores_do_not_depend_on_the_chunk_size(
    task: QualityTask, tmp_path: Path, whole: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", len(task.captions))
    scores = run(task, Noise(), tmp_path)
    for name in ("FID", "CLIP"):
        expected = whole.figures[name].value
        assert scores.figures[name].value == pytest.approx(expected, rel=1e-5), name


def test_scored_pictures_are_made_again_to_be_saved(task: QualityTask, tmp_path: Path) -> None:
    run(task, Noise(), tmp_path / "out")
    again, saved = Noise(), tmp_path / "saved"
    Evaluation(task, again, tmp_path / "out", save=saved).run(rounds=1)
    names = [f"{i:06}.png" for i in range(len(task.captions))]
    assert [path.name for path in sorted(saved.iterdir())] == names
    (saved / f"{CHUNK:06}.png").unlink()
    again.requested.clear()
    Evaluation(task, again, tmp_path / "out", save=saved).run(rounds=1)
    assert again.requested == [list(range(CHUNK, 2 * CHUNK))], "only that chunk"


def test_the_folder_of_another_evaluation_is_refused(task: QualityTask, tmp_path: Path) -> None:
    run(task, Noise(), tmp_path)
    other = replace(task, captions=(*task.captions[:-1], "a ring"))
    with pytest.raises(
        InvalidParams, match="out must be a new or empty folder: it holds another evaluation"
    ):
        run(other, Noise(), tmp_path)


def test_a_picture_of_another_size_is_refused(task: QualityTask, tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match="images must be 128×128, got 'picture 0 of 64×64"):
        run(task, Noise(side=64), tmp_path)
