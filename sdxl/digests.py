"""sha256 of files, cached on disk until the files change.

The kernel's ctime shows a change: a writer can restore a file's size and mtime, but not its ctime.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from sdxl.files import OutputError, prepare_folder, write_atomic
from sdxl.places import home

CLOCK_NS = 50_000_000
"""Two changes in one tick of the kernel's clock have the same time; a tick takes up to 10 ms."""
Stamp = tuple[int, ...]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_digest(paths: list[Path], compute: Callable[[], str]) -> str:
    """Return the cached result of `compute` for these files, so that gigabytes are read once."""
    before = settled_stamps(paths)
    names = "\0".join(str(path.resolve()) for path in paths)
    note = home() / "digests" / hashlib.sha256(f"{names}\0{before}".encode()).hexdigest()
    try:
        if re.fullmatch(r"[0-9a-f]{64}", digest := note.read_text(encoding="ascii")):
            return digest
    except (OSError, UnicodeDecodeError):
        # The cache has no entry, or a damaged one.
        pass
    digest = compute()
    if stamps(paths) == before:
        try:
            prepare_folder(note.parent)
            write_atomic(note, digest.encode())
        except OutputError:
            # The home cannot be written: the next start computes the digest again.
            pass
    return digest


def stamps(paths: Iterable[Path]) -> list[Stamp]:
    """Return a stamp of each file, which changes with the file's bytes."""
    return [
        (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for status in map(os.stat, paths)
    ]


def settled_stamps(paths: Iterable[Path]) -> list[Stamp]:
    """Return the stamps after the clock's next tick, so that a later change has a later time."""
    settled = stamps(paths)
    if any(abs(time.time_ns() - stamp[-1]) < CLOCK_NS for stamp in settled):
        time.sleep(CLOCK_NS / 1e9)
    return settled
