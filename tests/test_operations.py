"""docs/operations.md: every `console` command runs and prints what the page shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks, commands, shell_commands
from tests.isolation import run_alone

DOCUMENT = ROOT / "docs" / "operations.md"
ELSEWHERE = {"docker", "kubectl"}
"""Programs of `sh` blocks, which need Docker or Kubernetes."""


def printed_lines() -> Iterator[str]:
    for block in blocks(DOCUMENT, "console"):
        yield from (line for line in block.splitlines() if not line.startswith("$ "))


def test_what_is_not_run_needs_another_machine() -> None:
    assert {line.split()[0] for line in shell_commands(DOCUMENT)} == ELSEWHERE


def test_every_block_is_one_or_the_other() -> None:
    kinds = re.findall(r"^```(\w+)$", DOCUMENT.read_text(), re.M)
    assert set(kinds) == {"console", "sh"}


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_command_works_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    for name in ("serve", "eval", "sdxl", "engines", "onnx_export"):
        (tmp_path / name).symlink_to(ROOT / name)
    # A busy machine may take longer to finish what is in flight than operators would wait.
    script = "\n".join(["set -x", "export SDXL_SHUTDOWN_S=200", *commands(DOCUMENT)])
    done = run_alone(script, tmp_path, 2300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    output = done.stdout + done.stderr
    missing = [line for line in printed_lines() if line not in output]
    assert not missing, f"not printed: {missing}\n{done.stdout[-3000:]}"
