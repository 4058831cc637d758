"""docs/operations.md: every command that a plain machine can run is run; the others are named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks, check_bash, check_links, commands
from tests.isolation import run_alone

DOCUMENT = ROOT / "docs" / "operations.md"
ELSEWHERE = {"docker", "kubectl"}
"""Programs that need more than a plain machine."""


def told() -> Iterator[str]:
    """Lines that the document says are printed."""
    for block in blocks(DOCUMENT, "console"):
        yield from (line for line in block.splitlines() if not line.startswith("$ "))


def test_every_command_is_bash() -> None:
    check_bash(commands(DOCUMENT))


def test_what_is_not_run_needs_another_machine() -> None:
    programs = {line.split()[0] for block in blocks(DOCUMENT, "sh") for line in block.splitlines()}
    assert programs == ELSEWHERE


def test_every_block_is_one_or_the_other() -> None:
    kinds = re.findall(r"^```(\w+)$", DOCUMENT.read_text(), re.M)
    assert set(kinds) == {"console", "sh"}


def test_files_and_headings_that_it_links_to_are_there() -> None:
    check_links(DOCUMENT)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_command_works_and_says_what_the_document_says(tmp_path: Path) -> None:
    for name in ("serve", "eval", "sdxl", "engines", "onnx_export"):
        (tmp_path / name).symlink_to(ROOT / name)
    # A busy machine may take longer to finish what is in flight than operators would wait.
    script = "\n".join(["set -x", "export SDXL_SHUTDOWN_S=200", *commands(DOCUMENT)])
    done = run_alone(script, tmp_path, 2300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    said = done.stdout + done.stderr
    missing = [line for line in told() if line not in said]
    assert not missing, f"not printed: {missing}\n{done.stdout[-3000:]}"
