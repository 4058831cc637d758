"""`sdxl bench gpu` in a dry run: its sections and its report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.gpu import command as gpu
from eval.gpu.command import FILE, SECTIONS
from sdxl.params import InvalidParams

QUICK = ["agreement", "pictures", "requests", "promises"]
"""the sections of slow tests; long tests run all"""


def dry_run(out: Path, sections: list[str]) -> dict[str, Any]:
    precisions = ["--precisions", "fp32", "fp8"]
    code = gpu.main(["--dry-run", "--out", str(out), *precisions, "--sections", *sections])
    report: dict[str, Any] = json.loads((out / FILE).read_text())
    errors = {n: found["traceback"] for n, found in report["sections"].items() if "error" in found}
    assert not code and not errors, errors
    assert list(report["sections"]) == sections
    return report


@pytest.fixture
def own_home(one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDXL_HOME", str(tmp_path / "home"))


@pytest.mark.slow
def test_a_dry_run_has_the_figures_of_a_cpu(own_home: None, tmp_path: Path) -> None:
    sections = dry_run(tmp_path / "out", QUICK)["sections"]
    assert sections["requests"]["fp8"]["broken"] == 0, sections["requests"]
    least = sections["pictures"]["fp32"]["least"]
    assert least == 120.0, f"fp32 to itself: {least} dB, needed 120"
    error = max(sections["agreement"]["mini, fp8"]["by_step"])
    assert 0 < error < 0.06, f"fp8's UNet: {error:.4f}, at most 0.06"
    admitted = sections["promises"]["admitted"]
    assert admitted == {"refused": [], "failed": [], "finished": 3}, admitted


@pytest.mark.long
def test_every_section_has_a_dry_run(own_home: None, tmp_path: Path) -> None:
    dry_run(tmp_path / "out", [name for name in SECTIONS if name not in QUICK])


def test_a_failed_section_does_not_stop_the_others_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def begin(name: str, bench: object) -> Iterator[tuple[str, Any]]:
        """The first section to begin breaks; it works the second time."""
        begun.append(name)
        if len(begun) == 1:
            yield "before", 1
            raise RuntimeError("the GPU has gone")
        yield "found", 2

    monkeypatch.setattr(gpu, "SECTIONS", {"broken": ("", 0), "whole": ("", 0)})
    monkeypatch.setattr(gpu, "begin", begin)
    command = ["--dry-run", "--out", str(tmp_path), "--sections", "broken", "whole"]
    assert gpu.main(command) == 1
    sections = json.loads((tmp_path / FILE).read_text())["sections"]
    assert sections["broken"]["before"] == 1 and "the GPU has gone" in sections["broken"]["error"]
    assert gpu.main(command) == 0
    assert begun == ["broken", "whole", "broken"], "the other section is kept"
    sections = json.loads((tmp_path / FILE).read_text())["sections"]
    assert sections["broken"]["found"] == sections["whole"]["found"] == 2


def test_every_figure_is_stored_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read the file in the middle of a section, as a kill would leave it."""
    seen: list[dict[str, Any]] = []

    def observed(name: str, bench: object) -> Iterator[tuple[str, Any]]:
        for number in range(3):
            yield str(number), number
            seen.append(json.loads((tmp_path / FILE).read_text())["sections"]["looking"])

    monkeypatch.setattr(gpu, "SECTIONS", {"looking": ("", 0)})
    monkeypatch.setattr(gpu, "begin", observed)
    gpu.main(["--dry-run", "--out", str(tmp_path), "--sections", "looking"])
    assert [list(each) for each in seen] == [["0"], ["0", "1"], ["0", "1", "2"]]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("is_dry", False),
        ("precisions", ["int8"]),
        ("torch_options", None),
        ("system", {"processor": "another"}),
    ],
)
def test_figures_of_another_machine_or_of_other_flags_are_not_kept(
    name: str, changed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "SECTIONS", {"found": ("", 0)})
    monkeypatch.setattr(gpu, "begin", lambda name, bench: [("found", 1)])
    command = ["--dry-run", "--out", str(tmp_path), "--sections", "found"]
    assert gpu.main(command) == gpu.main(command) == 0
    file = tmp_path / FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: changed}))
    before = file.read_bytes()
    with pytest.raises(InvalidParams, match=f"another folder: figures there have another {name},"):
        gpu.main(command)
    assert file.read_bytes() == before


def test_a_missing_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidParams, match="dry-run must be set: there is no NVIDIA GPU here"):
        gpu.main(["--out", str(tmp_path)])
