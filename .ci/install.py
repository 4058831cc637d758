"""What `make setup` installs with: uv where it is or can be had, else pip.

    .venv/bin/python .ci/install.py -c constraints.txt -e '.[dev]'

uv takes a fraction of pip's time, and does not read pip's settings: where packages come from is
asked of pip, each time, and handed over. Without an NVIDIA GPU uv chooses PyTorch's build for CPUs,
where PyTorch's own index can be reached. Runs in the environment that it fills; needs nothing there
but pip.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FLAGS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
CHOOSE_TORCH = ("--torch-backend", "auto")
PROBE_S = 30.0


def pip_settings(listed: str) -> dict[str, str]:
    """Of what `pip config list` prints: the environment goes before files, a command's own
    section before the global one."""
    entries: dict[str, dict[str, str]] = {section: {} for section in ("global", "install", ":env:")}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in entries:
            entries[section][name] = ast.literal_eval(value)
    return entries["global"] | entries["install"] | entries[":env:"]


def uv_flags(settings: dict[str, str]) -> list[str]:
    """pip's sources in uv's words; a setting may name several, apart by blanks."""
    flags = [
        part
        for name, flag in FLAGS.items()
        for value in settings.get(name, "").split()
        for part in (flag, value)
    ]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        flags.append("--no-index")
    # As pip does: the best version of all indexes, not of the first that has any.
    return [*flags, "--index-strategy", "unsafe-best-match"]


def find_uv() -> str | None:
    """One on the PATH that runs, or the environment's own, installed if need be."""
    own = str(Path(sys.executable).with_name("uv"))
    for uv in (shutil.which("uv"), own):
        if uv and does_run(uv, "--version"):
            return uv
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    return own if does_run(*pip, "uv") and does_run(own, "--version") else None


def can_choose_torch(install: Sequence[str]) -> bool:
    """Return whether PyTorch's own index can be reached, with one short try. `--reinstall`: uv
    would not contact the index if PyTorch is installed."""
    command = (*install, *CHOOSE_TORCH, "--dry-run", "--no-deps", "--reinstall", "torch")
    return does_run(*command, UV_HTTP_RETRIES="0", UV_HTTP_TIMEOUT="5")


def does_run(*command: str, **variables: str) -> bool:
    try:
        done = subprocess.run(
            command, capture_output=True, env={**os.environ, **variables}, timeout=PROBE_S
        )
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def environment(settings: dict[str, str]) -> dict[str, str]:
    """Return the environment, in which uv uses pip's certificates."""
    found = dict(os.environ)
    if cert := settings.get("cert"):
        found.setdefault("SSL_CERT_FILE", cert)
    return found


def main(arguments: Sequence[str]) -> int:
    listing = subprocess.run(
        (sys.executable, "-m", "pip", "config", "list"), capture_output=True, text=True
    )
    settings = pip_settings(listing.stdout)
    uv = find_uv()
    if uv is not None:
        command = [uv, "pip", "install", "--python", sys.executable, *uv_flags(settings)]
        if sys.dont_write_bytecode:
            # Else every process would compile PyTorch and all the rest anew.
            command.append("--compile-bytecode")
        if can_choose_torch(command):
            command += CHOOSE_TORCH
        if subprocess.run([*command, *arguments], env=environment(settings)).returncode == 0:
            return 0
        print("uv could not install it; now pip tries", file=sys.stderr)
    return subprocess.run((sys.executable, "-m", "pip", "install", *arguments)).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
