"""Programs that some tests run, and packages that some install in folders of their own. Where one
is missing or cannot be had the test skips, with what would bring it; in CI that is a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[1]
REQUIRED = "CI_REQUIRES_TOOLS"
INSTALL_S = 500.0


def tool(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        missing(f"{name} is not installed (Debian's package {package})")
    return found


def missing(told: str) -> NoReturn:
    assert not os.environ.get(REQUIRED), f"{told}, and {REQUIRED} is set"
    pytest.skip(told)


def install_python(folder: Path, *packages: str) -> Path:
    """Into the folder alone, as `make setup` installs; a process with it in PYTHONPATH has them."""
    installer = (sys.executable, str(ROOT / ".ci" / "install.py"))
    install((*installer, "--target", str(folder), *packages), packages)
    return folder


def install_node(folder: Path, *packages: str) -> Path:
    """Into the folder's node_modules, which programs in that folder find."""
    npm = tool("npm", "npm")
    quiet = ("--no-audit", "--no-fund", "--loglevel=error")
    install((npm, "install", "--prefix", str(folder), *quiet, *packages), packages)
    return folder


def install(command: Sequence[str], packages: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        missing(f"{' '.join(packages)} could not be installed; is there a network? {said}")
