"""docs/troubleshooting.md: the program prints each message when its cause occurs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.serve.troubles import SERVED
from tests.troubles import LOCAL, Cause, Trouble

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
CAUSES: dict[str, Cause] = {**LOCAL, **SERVED}
ROW = re.compile(r"^\| (\d{3} )?`([^`]+)` \|", re.M)


def messages() -> list[str]:
    """Return every message, after its status if it has one."""
    return [status + message for status, message in ROW.findall(DOCUMENT.read_text())]


def test_every_row_has_a_cause() -> None:
    rows = re.findall(r"^\| (?!message|---).*$", DOCUMENT.read_text(), re.M)
    assert len(rows) == len(messages()) >= 20
    rows_of = {key: [m for m in messages() if key in m] for key in CAUSES}
    assert {key: len(lines) for key, lines in rows_of.items()} == dict.fromkeys(CAUSES, 1)
    assert sorted(line for (line,) in rows_of.values()) == sorted(messages())


@pytest.mark.parametrize("key", CAUSES)
def test_the_program_prints_the_message(
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (message,) = (each for each in messages() if key in each)
    monkeypatch.setenv("SDXL_HOME", str(tmp_path / "home"))
    printed = " ".join(CAUSES[key](Trouble(tmp_path, monkeypatch, capsys, caplog)).split())
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    # An answer begins with its status.
    assert re.search(rf"^{pattern}" if message[:3].isdigit() else pattern, printed), printed
