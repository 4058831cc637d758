"""docs/troubleshooting.md: each message is brought about, and is what the program prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.serve.troubles import SERVED
from tests.troubles import LOCAL, Bring, Trouble

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
BRINGS: dict[str, Bring] = {**LOCAL, **SERVED}
ROW = re.compile(r"^\| (\d{3} )?`([^`]+)` \|", re.M)


def messages() -> list[str]:
    """With their status, if they have one."""
    return [status + message for status, message in ROW.findall(DOCUMENT.read_text())]


def test_every_row_is_one_that_is_brought_about() -> None:
    rows = re.findall(r"^\| (?!message|---).*$", DOCUMENT.read_text(), re.M)
    assert len(rows) == len(messages()) >= 20
    found = {key: [m for m in messages() if key in m] for key in BRINGS}
    assert {key: len(lines) for key, lines in found.items()} == dict.fromkeys(BRINGS, 1)
    assert sorted(line for (line,) in found.values()) == sorted(messages())


@pytest.mark.parametrize("key", BRINGS)
def test_the_message_is_what_is_printed(
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (message,) = (each for each in messages() if key in each)
    monkeypatch.setenv("SDXL_HOME", str(tmp_path / "home"))
    said = " ".join(BRINGS[key](Trouble(tmp_path, monkeypatch, capsys, caplog)).split())
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    # A status is the first word of an answer.
    assert re.search(rf"^{pattern}" if message[:3].isdigit() else pattern, said), said
