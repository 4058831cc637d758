"""Ctrl-C at random moments: the command ends soon, says so, leaves no process or broken file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from tests.serve.batch.drawers import prompts
from tests.serve.services import ROOT, is_alive

TIMES = int(os.environ.get("CTRL_C_TIMES", "30"))
SOON_S = 30.0
"""much longer than the usual few seconds, for a loaded machine"""
ENDS = (0, 130, -signal.SIGINT)
"""the exit codes: finished, interrupted, or interrupted while Python starts"""


def start(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the command in its own session, as a terminal gives a command its own group."""
    command = [sys.executable, "-m", "sdxl.cli", *argv]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
        )


def strike(argv: list[str], after_s: float, log: Path) -> tuple[int, float]:
    """Return the exit code and the seconds from Ctrl-C to the end of the last process."""
    process = start(argv, log)
    time.sleep(after_s)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    try:
        code = process.wait(SOON_S)
        gone_by = time.monotonic() + SOON_S
        while left := [each for each in family if is_alive(each)]:
            assert time.monotonic() < gone_by, f"left after {after_s:.2f} s: {left}"
            time.sleep(0.05)
    except subprocess.TimeoutExpired:
        # Show in the failure where the command hangs.
        raise AssertionError(
            f"still there, struck after {after_s:.2f} s:\n{log.read_text()}"
        ) from None
    finally:
        for each in family:
            if is_alive(each):
                each.kill()
    return code, time.monotonic() - began


def undisturbed_s(argv: list[str], log: Path) -> float:
    began = time.monotonic()
    code = start(argv, log).wait()
    assert code == 0, log.read_text()
    return time.monotonic() - began


def check_pictures(out: Path) -> int:
    files = [path for path in out.rglob("*") if path.is_file()] if out.exists() else []
    assert not [path for path in files if path.suffix == ".tmp"], files
    pictures = [path for path in files if path.suffix == ".png"]
    for path in pictures:
        with Image.open(path) as image:
            image.load()
    return len(pictures)


@pytest.mark.long
@pytest.mark.timeout(3500)
@pytest.mark.parametrize("command", ["render", "batch"])
def test_ctrl_c_ends_a_command(command: str, tmp_path: Path) -> None:
    source = str(prompts(tmp_path, 20))
    rest = {"render": ["a red circle", "--n", "4", "--seed", "1"], "batch": [source, "--quiet"]}
    argv = [command, *rest[command], "--out"]
    log, chance = tmp_path / "said", random.Random(7)
    whole_s = undisturbed_s([*argv, str(tmp_path / "undisturbed")], log)
    codes, slowest_s = dict.fromkeys(ENDS, 0), 0.0
    for number in range(TIMES):
        out, after_s = tmp_path / str(number), chance.uniform(0.05, whole_s)
        code, took_s = strike([*argv, str(out)], after_s, log)
        made = check_pictures(out)
        line = f"struck after {after_s:.2f} of {whole_s:.2f} s: {code}, {took_s:.2f} s, {made} made"
        print(line, flush=True)
        assert code in ENDS, f"{line}\n{log.read_text()[-3000:]}"
        codes[code] += 1
        slowest_s = max(slowest_s, took_s)
    print(f"exit codes {codes}, {slowest_s:.2f} s at most")
