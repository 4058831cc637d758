"""`sdxl bench` runs its benchmarks by name."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from eval.bench_command import BENCHMARKS, main
from sdxl import cli


def test_every_benchmark_exists_and_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    page = capsys.readouterr().out
    for name, (module, _) in BENCHMARKS.items():
        assert find_spec(f"eval.{module}") and f"  {name} " in page, name


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "speed"]) == cli.BAD_REQUEST
    assert (
        "benchmark: 'speed' is not allowed; needed one of peers, floor" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["mlperf", "--scenario", "Ofline"], "scenario: 'Ofline' is not allowed; needed one of"),
        (["mlperf", "--model", "org/name"], "captions: None is not allowed; org/name needed"),
        (["mlperf", "--audit", "TEST05"], "audit: 'TEST05' is not allowed; needed one of TEST01"),
        (
            ["mlperf", "--url", "u", "--precision", "int8"],
            "precision: 'int8' is not allowed; needed",
        ),
        (["mlperf", "--url", "u", "--backend", "torch"], "backend: 'torch' is not allowed; needed"),
        (["mlperf", "--url", "u", "--deterministic"], "deterministic: True is not allowed; needed"),
        (["load", "--url", "u", "--secs", "5"], "flags: '--secs 5' is not allowed; needed none"),
        (["floor", "--rows", "0"], "rows: 0 is not allowed; needed at least 1"),
    ],
)
def test_a_wrong_value_is_reported(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *argv]) == cli.BAD_REQUEST
    assert said in capsys.readouterr().err


def test_a_benchmark_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.speed.floor.main", lambda argv: len(argv))
    assert main(["floor", "--rows", "2"]) == 2
