"""Our Triton kernels against PyTorch, on a CPU under Triton's interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux alone")

ROOT = Path(__file__).parents[3]
PROGRAMS = {"interpreted_kernels": ("interpreted_attention",), "interpreted_slots": ()}
"""the programs, and the further files whose checks they run"""


def names_of(program: str) -> list[str]:
    files = [Path(__file__).with_name(f"{name}.py") for name in (program, *PROGRAMS[program])]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return re.findall(r"^@check\ndef (\w+)", text, re.MULTILINE)


@cache
def results_of(program: str) -> dict[str, list[str]]:
    """The errors by the name of the check."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engines.pytorch.{program}"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert not done.returncode, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "name"), [(program, name) for program in PROGRAMS for name in names_of(program)]
)
def test_a_kernel_computes_what_pytorch_does_in_float64(program: str, name: str) -> None:
    wrong = results_of(program)[name]
    assert not wrong, "\n".join(wrong)
