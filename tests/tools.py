"""Find programs that tests run, and install packages into separate folders. If one is missing the
test skips and says what to install; in CI it fails."""

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
    path = shutil.which(name)
    if path is None:
        missing(f"{name} is not installed (Debian's package {package})")
    return path


def missing(message: str) -> NoReturn:
    assert not os.environ.get(REQUIRED), f"{message}, and {REQUIRED} is set"
    pytest.skip(message)


def install_python(folder: Path, *packages: str) -> Path:
    """Install into the folder as `make setup` does, for a process with it in PYTHONPATH."""
    installer = (sys.executable, str(ROOT / ".ci" / "install.py"))
    install((*installer, "--target", str(folder), *packages), packages)
    return folder


def install_node(folder: Path, *packages: str) -> Path:
    """Install into the folder's node_modules."""
    npm = tool("npm", "npm")
    quiet = ("--no-audit", "--no-fund", "--loglevel=error")
    install((npm, "install", "--prefix", str(folder), *quiet, *packages), packages)
    return folder


def install(command: Sequence[str], packages: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        output = (done.stderr or done.stdout).strip()[-500:]
        missing(f"{' '.join(packages)} could not be installed; is there a network? {output}")
