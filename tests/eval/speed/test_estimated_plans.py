"""Estimated plans: their notation, their cost, and MLPerf's rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.speed.estimated_plans import PLANS, describe, is_closed, read
from sdxl.cli import main
from sdxl.params import InvalidParams

PAGE = (Path(__file__).parents[3] / "docs" / "tuning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("20", "euler 20, exact"),
        ("20/2", "euler 20, interval 2"),
        ("4/2", "euler 4, interval 2"),
        ("4", "euler 4, exact"),
        ("dpmpp_2m:20:0,2,5", "dpmpp_2m 20, deep 0,2,5"),
    ],
)
def test_a_plan_is_parsed(text: str, words: str) -> None:
    assert describe(read(text)) == words


@pytest.mark.parametrize("text", ["", "x", "20/", "20:", "20/2/2", "0", "20:1,2", "20:0,20", "a:5"])
def test_other_text_is_not_a_plan(text: str) -> None:
    with pytest.raises(InvalidParams):
        read(text)


def test_the_default_plans_are_in_docs_tuning() -> None:
    for text in PLANS:
        assert f"fp32 {describe(read(text))} |" in PAGE, (
            f"docs/tuning.md has no {describe(read(text))}"
        )


def test_the_closed_division_allows_only_the_reference_steps() -> None:
    assert [text for text in PLANS if is_closed(read(text))] == ["20"]
    assert not is_closed(read("dpmpp_2m:20"))


def test_a_plan_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "floor", "--plan", "20"]) == 2
    assert "needed --gpu with it" in capsys.readouterr().err


@pytest.mark.long
def test_docs_tuning_has_the_commands_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "floor", "--gpu", "h200", "--rows", "32", "--plan"]
    assert f"sdxl {' '.join(command)}" in PAGE
    assert main(command) == 0
    text = capsys.readouterr().out
    missing = [line for line in text.splitlines() if line.startswith("|") and line not in PAGE]
    assert not missing, "renew it as the page describes:\n" + "\n".join(missing)
    assert main([*command, "20", "20/2", "--json"]) == 0
    full, half = json.loads(capsys.readouterr().out)["plans"]
    assert full["teraflops"] == pytest.approx(279.1, abs=0.1)
    assert half["teraflops"] == pytest.approx(149.5, abs=0.1)
    for name, rate in full["images_per_second"].items():
        assert rate < half["images_per_second"][name] < 2 * rate, name
