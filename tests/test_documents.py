"""Every Markdown document: its links lead somewhere, its commands are bash, its flags exist."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.documents import (
    ROOT,
    broken_links,
    calls_of_sdxl,
    check_flags,
    commands,
    shell_commands,
)

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "examples" / "README.md"]
DOCUMENTS = sorted(DOCUMENTS)
pytestmark = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)


def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    assert broken_links(document) == []


def test_every_command_is_bash_and_has_only_flags_that_exist(document: Path) -> None:
    lines = [*commands(document), *shell_commands(document)]
    for line in lines:
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    check_flags(calls_of_sdxl(line for line in lines if "…" not in line))
