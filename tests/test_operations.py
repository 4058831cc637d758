"""docs/operations.md's `console` commands run and print what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import ROOT, blocks, commands
from tests.isolation import run_alone


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_command_of_operations_works_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    document = ROOT / "docs" / "operations.md"
    for name in ("serve", "eval", "sdxl", "engines", "onnx_export"):
        (tmp_path / name).symlink_to(ROOT / name)
    # A busy machine may take longer to finish pictures in flight than operators would wait.
    script = "\n".join(["set -x", "export SDXL_SHUTDOWN_S=200", *commands(document)])
    done = run_alone(script, tmp_path, 2300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    output = done.stdout + done.stderr
    shown = [line for block in blocks(document, "console") for line in block.splitlines()]
    missing = [line for line in shown if not line.startswith("$ ") and line not in output]
    assert not missing, f"not printed: {missing}\n{done.stdout[-3000:]}"
