"""Run a script with its own processes, network, /tmp and shared memory, so that the script may use
default ports and kill by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.tools import ROOT, tool

NAMESPACES = ("--pid", "--net", "--mount", "--fork", "--mount-proc", "--kill-child")
HERE = Path("/mnt")
"""The script's folder."""


@cache
def is_permitted() -> bool:
    done = subprocess.run([tool("unshare", "util-linux"), *NAMESPACES, "true"], capture_output=True)
    return done.returncode == 0


def run_alone(
    script: str, folder: Path, timeout_s: float, user: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run as root, or as a user without rights for whom the root folder is read-only."""
    if not is_permitted():
        pytest.skip("this needs the right to make namespaces, which root has")
    (folder / "script.sh").write_text(script)
    steps = [
        f"{tool('ip', 'iproute2')} link set lo up",
        f"mount --bind {folder} {HERE}",
        *empty_tmp(),
        "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        *([*readable_python(), "mount -o remount,bind,ro /"] if user else []),
        f"cd {HERE}",
        f"exec setpriv --reuid {user} --regid {user} --clear-groups bash -eu -o pipefail script.sh",
    ]
    return subprocess.run(
        ["unshare", *NAMESPACES, "bash", "-c", " && ".join(steps)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(),
    )


def empty_tmp() -> list[str]:
    """Return commands that empty /tmp, except this project if it lies there."""
    emptied = "mount -t tmpfs -o mode=1777 tmpfs /tmp"
    if not ROOT.is_relative_to("/tmp"):
        return [emptied]
    return [f"mount --bind {ROOT} /srv", emptied, f"mkdir -p {ROOT}", f"mount --bind /srv {ROOT}"]


def readable_python() -> list[str]:
    """Return commands that leave only the interpreter in root's home, if it lies there."""
    base = sys.base_prefix
    if not base.startswith("/root/"):
        return []
    return [
        f"mount --bind {base} /media",
        "mount -t tmpfs -o mode=755 tmpfs /root",
        f"mkdir -p {base}",
        f"mount --bind /media {base}",
    ]


def environment() -> dict[str, str]:
    """Return this environment without settings of the service, with this interpreter's programs."""
    settings = ("SDXL_", "RAY_", "PYTEST_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(settings)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "HOME": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
