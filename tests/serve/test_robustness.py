"""What the service stands, a few minutes of each: `sdxl bench robustness` is the same for hours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.robustness.command import main

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("run", "flags"),
    [
        ("fuzz", ("--seconds", "1500", "--count", "20000")),
        ("leavers", ("--count", "1000", "--speed", "5")),
        ("load", ("--seconds", "120")),
        ("overload", ("--seconds", "120")),
        ("soak", ("--seconds", "300", "--rate", "0.8")),
    ],
)
def test_everything_holds(run: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    code = main([run, *flags, "--out", str(tmp_path)])
    (report,) = tmp_path.glob("*.json")
    told = json.loads(report.read_text())
    broken = [check for check in told["checks"] if not check["holds"]]
    assert code == 0 and not broken, broken
