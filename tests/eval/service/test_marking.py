"""Services take turns, and shares are of `off` in the same round."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from eval.service import marking
from sdxl import cli


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds in the order of their turns; each turn is slower than the one before."""
    turns: list[str] = []

    @contextmanager
    def service(flags: Sequence[str]) -> Iterator[str]:
        assert flags[0] == "--provenance" and [*flags[2:]] == ["--model", "x"]
        yield flags[1]

    def rate(url: str, seconds: float) -> float:
        turns.append(url)
        return (10.0 if url == "off" else 9.0) / len(turns)

    monkeypatch.setattr(marking, "local_service", service)
    monkeypatch.setattr(marking, "rate", rate)
    return turns


def test_services_take_turns_and_shares_are_round_by_round(
    turns: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "marking.json"
    argv = ["bench", "marking", "--kinds", "c2pa", "--rounds", "2", "--save", str(file)]
    assert cli.main([*argv, "--model", "x"]) == 0
    # One warm-up each; then the first kind changes every round.
    assert turns == ["off", "c2pa", "off", "c2pa", "c2pa", "off"]
    report = json.loads(file.read_text())
    assert report["images/s"] == {"off": [10 / 3, 10 / 6], "c2pa": [9 / 4, 9 / 5]}
    share = report["share of off"]["c2pa"]
    assert share["low"] == pytest.approx(0.675) and share["high"] == pytest.approx(1.08)
    assert "c2pa " in capsys.readouterr().out


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "marking", "--kinds", "off"]) == cli.BAD_REQUEST
    assert "argument --kinds: invalid choice: 'off'" in capsys.readouterr().err
