"""The drill at full size, rehearsed with the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.robustness.drill import STEPS, Drill, DrillFailed, main


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_step_passes_and_is_not_done_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--out", str(tmp_path), "--model", "mini", "--side", "128", "--small-side", "128"]
    assert main(argv) == 0
    steps = json.loads((tmp_path / "drill.json").read_text())["steps"]
    assert list(steps) == list(STEPS)
    capsys.readouterr()
    assert main(argv) == 0
    assert capsys.readouterr().out.count("done before") == len(STEPS)


@pytest.mark.slow
def test_a_failed_step_is_told_and_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drills = list[Drill]()

    def fail_once(drill: Drill) -> dict[str, str]:
        drills.append(drill)
        if len(drills) == 1:
            raise DrillFailed("no memory")
        return {}

    monkeypatch.setattr("eval.robustness.drill.STEPS", {"first": lambda _: {}, "second": fail_once})
    argv = ["--out", str(tmp_path), "--model", "mini"]
    assert [main(argv), main(argv), main(argv)] == [1, 0, 0]
    assert "full-size-drill: no memory" in capsys.readouterr().err and len(drills) == 2


def test_a_rehearsal_is_not_taken_for_the_drill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eval.robustness.drill.STEPS", {"one": lambda _: {}})
    for flags in (["--model", "mini"], ["--side", "128"], ["--small-side", "128"]):
        out = tmp_path / flags[0]
        assert main(["--out", str(out), *flags]) == 0
        assert main(["--out", str(out)]) == 1, flags
        assert f"is of {flags[0][2:].replace('-', '_')} " in capsys.readouterr().err
