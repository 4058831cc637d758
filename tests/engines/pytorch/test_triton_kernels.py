"""Our Triton kernels against PyTorch, on a CPU under Triton's interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux alone")

ROOT = Path(__file__).parents[3]
SOURCES = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("interpreted_*")]
NAMES = re.findall(r"^@check\ndef (\w+)", "\n".join(SOURCES), re.MULTILINE)


@pytest.fixture(scope="module")
def wrong() -> dict[str, list[str]]:
    """By the name of the check."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.pytorch.interpreted_kernels"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert not done.returncode, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_computes_what_pytorch_does_in_float64(
    name: str, wrong: dict[str, list[str]]
) -> None:
    assert not wrong[name], "\n".join(wrong[name])
