"""The command that measures everything on one H200 runs here in small, and keeps what it found."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.h200 import command as h200
from eval.h200.bench import Bench
from eval.h200.command import FILE, SECTIONS, Section
from eval.h200.page import against_goal, page
from eval.h200.speed import peers_1
from eval.speed.variants import EAGER, name_of
from sdxl.params import InvalidParams

ROOT = Path(__file__).parents[3]
QUICK = ["peers_1", "stages", "profile", "agreement", "pictures", "requests", "kernels"]
"""for every run of the tests; `long` has them all"""


def dry_run(out: Path, sections: list[str]) -> dict[str, Any]:
    code = h200.main(["--dry-run", "--out", str(out), "--sections", *sections])
    report: dict[str, Any] = json.loads((out / FILE).read_text())
    errors = {n: found["traceback"] for n, found in report["sections"].items() if "error" in found}
    assert not code and not errors, errors
    assert list(report["sections"]) == sections
    return report


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDXL_HOME", str(tmp_path / "home"))


@pytest.mark.slow
def test_a_dry_run_finds_what_a_cpu_can_show(own_home: None, tmp_path: Path) -> None:
    sections = dry_run(tmp_path / "out", QUICK)["sections"]
    assert sections["requests"]["fp8"]["broken"] == 0, sections["requests"]
    least = sections["pictures"]["fp32"]["least"]
    assert least == 100.0, f"fp32 against itself: {least} dB, needed 100"
    error = max(sections["agreement"]["mini, fp8"]["by_step"])
    assert 0 < error < 0.06, f"fp8's UNet: {error:.4f}, at most 0.06"
    assert sections["profile"]["fp32, interval 1"]["host_s_a_tick"] > 0
    assert sections["peers_1"]["figures"]["images/s"]
    assert "Nothing here has been measured yet" in page({"is_dry": True})


@pytest.mark.long
def test_every_section_runs_dry(own_home: None, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    others = [name for name in SECTIONS if name not in (*QUICK, "rtx_full")]
    plan = dry_run(tmp_path / "out", others)["sections"]["rtx"]["unet_shallow, SM89"]
    assert plan.get("bytes", 0) > 0, plan


def broken(bench: object) -> Iterator[tuple[str, Any]]:
    yield "before", 1
    raise RuntimeError("the GPU has gone")


def whole(bench: object) -> Iterator[tuple[str, Any]]:
    yield "found", 2


def test_a_section_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "tests.eval.h200.test_command"
    sections = {n: Section(module, n, 0) for n in ("broken", "whole")}
    monkeypatch.setattr(h200, "SECTIONS", sections)
    monkeypatch.setattr(Section, "begin", lambda self, bench: globals()[self.function](bench))
    assert h200.main(["--dry-run", "--out", str(tmp_path), "--sections", *sections]) == 1
    found = json.loads((tmp_path / FILE).read_text())["sections"]
    assert found["broken"]["before"] == 1 and "the GPU has gone" in found["broken"]["error"]
    assert found["whole"]["found"] == 2


def test_the_same_command_goes_on_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed is tried again, what was found is kept; the report may lie elsewhere."""
    began: list[str] = []

    def noting(self: Section, bench: object) -> Iterator[tuple[str, Any]]:
        began.append(self.function)
        return (broken if began.count("broken") == 1 and self.function == "broken" else whole)(
            bench
        )

    monkeypatch.setattr(h200, "SECTIONS", {n: Section("", n, 0) for n in ("broken", "whole")})
    monkeypatch.setattr(Section, "begin", noting)
    report = tmp_path / "small" / "report.json"
    command = ["--dry-run", "--out", str(tmp_path / "out"), "--report", str(report)]
    command += ["--sections", "broken", "whole"]
    assert h200.main(command) == 1
    assert h200.main(command) == 0
    assert began == ["broken", "whole", "broken"]
    sections = json.loads(report.read_text())["sections"]
    assert sections["broken"]["found"] == sections["whole"]["found"] == 2
    assert not (tmp_path / "out" / FILE).exists()


def test_sections_that_are_not_asked_for_stay_however_far_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h200, "SECTIONS", {n: Section("", n, 0) for n in ("broken", "whole")})
    monkeypatch.setattr(Section, "begin", lambda self, bench: globals()[self.function](bench))
    command = ["--dry-run", "--out", str(tmp_path), "--sections"]
    assert h200.main([*command, "broken"]) == 1
    assert h200.main([*command, "whole"]) == 0
    found = json.loads((tmp_path / FILE).read_text())["sections"]
    assert found["broken"]["before"] == 1 and found["whole"]["found"] == 2


@pytest.mark.slow
def test_a_peer_that_is_not_installed_costs_its_own_figures_alone(tmp_path: Path) -> None:
    class WithoutPeers(Bench):
        def peer(self, name: str) -> Any:
            raise ModuleNotFoundError("No module named 'DeepCache'")

    found = dict(peers_1(WithoutPeers(tmp_path, time.perf_counter() + 60, is_dry=True)))
    assert sum(key.startswith("passed over") for key in found) == 2
    assert found["figures"]["images/s"] and all(
        n.startswith("ours") for n in found["figures"]["seconds"]
    )


def test_every_figure_is_on_the_disk_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill: what the file holds while a section is under way."""
    seen: list[dict[str, Any]] = []

    def looking(_: object) -> Iterator[tuple[str, Any]]:
        for number in range(3):
            yield str(number), number
            seen.append(json.loads((tmp_path / FILE).read_text())["sections"]["looking"])

    monkeypatch.setattr(h200, "SECTIONS", {"looking": Section("", "", 0)})
    monkeypatch.setattr(Section, "begin", lambda self, bench: looking(bench))
    h200.main(["--dry-run", "--out", str(tmp_path), "--sections", "looking"])
    assert [list(each) for each in seen] == [["0"], ["0", "1"], ["0", "1", "2"]]


def test_an_unknown_section_and_a_missing_gpu_are_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidParams, match="sections: 'all' .*needed one of peers"):
        h200.main(["--sections", "all"])
    with pytest.raises(InvalidParams, match="no NVIDIA GPU here; needed --dry-run"):
        h200.main(["--out", str(tmp_path)])


def test_a_measured_page_has_every_figure_of_its_report() -> None:
    names = [EAGER, name_of("torch:fp16", 1), name_of("torch:fp16", 2)]
    spreads = [{"median": s, "low": s, "high": s} for s in (8.0, 4.0, 2.0)]
    half = {"torch:fp16": {"median": 0.5, "low": 0.4, "high": 0.6}}
    figures = {
        "seconds": dict(zip(names, spreads, strict=True)),
        "time at interval 2 over interval 1": half,
    }
    found = {"passed over, diffusers + DeepCache": "not here", "batch": 8, "figures": figures}
    system = {"accelerators": ["an H200"], "packages": {"torch": "2"}}
    sections = {"peers": found, "rtx": {"error": "no engine", "traceback": "…"}}
    text = page({"is_dry": False, "budget_s": 1, "system": system, "sections": sections})
    rows = [line for line in text.splitlines() if line.startswith(f"| {names[2]}")]
    assert rows == [f"| {names[2]} | 2.000 (2.000 to 2.000) | 0.500 (0.400 to 0.600) |"]
    for line in ("- batch: `8`", "- passed over, diffusers + DeepCache:", '- error: `"no engine"`'):
        assert line in text, line
    assert "figures:" not in text and "traceback" not in text


@pytest.mark.parametrize(("rate", "word"), [(2.42, "misses"), (2.43, "reaches")])
def test_an_estimate_is_held_against_its_goal(rate: float, word: str) -> None:
    line = against_goal("full", {"fp8, full": {"2": 1.0, "32": rate}, "fp8, DeepCache": {"2": 9.0}})
    assert line == f"- full: at most {rate} images/s on paper, which {word} the goal of 2.43"


def test_the_page_claims_nothing_without_a_run() -> None:
    assert (ROOT / "docs" / "h200.md").read_text() == page(None), (
        "run: python -m eval.h200.page > docs/h200.md"
    )
