"""An evaluation streams, goes on where it was killed, and is about one thing."""

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
def test_a_killed_run_goes_on_to_the_same_numbers(
    task: QualityTask, tmp_path: Path, whole: Scores
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(task, Noise(fails_at=CHUNK + 1), tmp_path, Noise())
    again = Noise()
    found = run(task, again, tmp_path, Noise())
    assert again.asked[0] == list(range(CHUNK, 2 * CHUNK)), "the first chunk was there"
    for name, figure in whole.figures.items():
        # A sum's last digits follow where in memory its terms lie.
        assert found.figures[name].value == pytest.approx(figure.value, rel=1e-7, abs=1e-7), name


def test_no_more_than_a_chunk_of_pictures_is_asked_for(task: QualityTask, tmp_path: Path) -> None:
    source = Noise()
    run(task, source, tmp_path)
    assert max(map(len, source.asked)) <= CHUNK
    assert [i for asked in source.asked for i in asked] == list(range(len(task.captions)))


def test_equal_pictures_are_found_equal(whole: Scores) -> None:
    assert whole.figures["ssim"].value == pytest.approx(1)
    assert whole.figures["psnr"].value == 100
    assert whole.figures["distance"].value == pytest.approx(0, abs=1e-6)


def test_a_figure_lies_in_its_interval(whole: Scores) -> None:
    clip = whole.figures["CLIP"]
    assert clip.interval.low <= clip.value <= clip.interval.high, clip


def test_chunks_of_another_size_give_the_same_scores(
    task: QualityTask, tmp_path: Path, whole: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", len(task.captions))
    found = run(task, Noise(), tmp_path)
    for name in ("FID", "CLIP"):
        expected = whole.figures[name].value
        assert found.figures[name].value == pytest.approx(expected, rel=1e-5), name


def test_pictures_are_kept_that_were_scored_before_anyone_asked_for_them(
    task: QualityTask, tmp_path: Path
) -> None:
    run(task, Noise(), tmp_path / "out")
    again, kept = Noise(), tmp_path / "kept"
    Evaluation(task, again, tmp_path / "out", save=kept).run(rounds=1)
    assert [path.name for path in sorted(kept.iterdir())] == [
        f"{i:06}.png" for i in range(len(task.captions))
    ]
    (kept / f"{CHUNK:06}.png").unlink()
    again.asked.clear()
    Evaluation(task, again, tmp_path / "out", save=kept).run(rounds=1)
    assert again.asked == [list(range(CHUNK, 2 * CHUNK))], "that chunk alone"


def test_another_evaluations_findings_are_not_mixed_in(task: QualityTask, tmp_path: Path) -> None:
    run(task, Noise(), tmp_path)
    other = replace(task, captions=(*task.captions[:-1], "a ring"))
    with pytest.raises(InvalidParams, match="out: .*it holds another evaluation"):
        run(other, Noise(), tmp_path)


def test_a_picture_of_another_size_is_refused(task: QualityTask, tmp_path: Path) -> None:
    with pytest.raises(InvalidParams, match="images: 'picture 0 of 64×64'.*needed 128×128"):
        run(task, Noise(side=64), tmp_path)
