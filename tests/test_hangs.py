"""A test that hangs fails alone, with all stacks printed; the others run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT_S = 4
TESTS = """
import ctypes, itertools, subprocess, sys, threading, time, pytest

def test_before(): pass

def test_hangs_in_python():
    while True: pass

def test_hangs_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_waits_for_a_process():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])

@pytest.fixture(scope="module")
def never_ready(): time.sleep(1000)

def test_waits_for_its_fixture(never_ready): pass

def test_swallows_errors():
    while True:
        try: time.sleep(1000)
        except Exception: pass

def test_between(): pass

def test_hangs_in_c():
    sum(itertools.repeat(0))

def test_hangs_in_c_without_the_interpreters_lock():
    mutex = ctypes.create_string_buffer(128)
    while True: ctypes.CDLL(None).pthread_mutex_lock(mutex)

def test_after(): pass
"""
OUTCOME = r"^(PASSED|FAILED|ERROR) \S*::test_(\w+)"
PASS = ("before", "between", "after")
IN_PYTHON = (
    "hangs_in_python",
    "hangs_in_a_lock",
    "waits_for_a_process",
    "waits_for_its_fixture",
    "swallows_errors",
)
IN_C = ("hangs_in_c", "hangs_in_c_without_the_interpreters_lock")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_python", "in_c"),
    [(IN_PYTHON[1:2], IN_C[:1]), pytest.param(IN_PYTHON, IN_C, marks=pytest.mark.long)],
)
def test_a_test_that_hangs_fails_alone(
    in_python: tuple[str, ...], in_c: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.hangs import *\nfrom tests import hangs\nhangs.load = lambda: 1.0\n"
    )
    (tmp_path / "test_some.py").write_text(TESTS)
    chosen = [f"{tmp_path / 'test_some.py'}::test_{name}" for name in in_order(*in_python, *in_c)]
    command = [sys.executable, "-m", "pytest", "-n", "1", "-rA", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--timeout", str(LIMIT_S), *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    output = done.stdout + done.stderr
    outcomes = {name: outcome for outcome, name in re.findall(OUTCOME, output, re.M)}
    assert {name for name, outcome in outcomes.items() if outcome == "PASSED"} == {*PASS}, output
    assert {*outcomes} == {*PASS, *in_python, *in_c}, output
    assert output.count(f"Timeout (>{LIMIT_S:.1f}s) from pytest-timeout") >= len(in_python), output
    for name in in_c:
        assert f"in test_{name}" in output, f"its stack is missing:\n{output}"


def in_order(*hung: str) -> list[str]:
    """Return these tests and those that pass, in their order in TESTS."""
    return [name for name in re.findall(r"def test_(\w+)", TESTS) if name in (*PASS, *hung)]
