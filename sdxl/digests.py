"""sha256 of files, remembered on disk until the files change.

A change shows in the kernel's ctime: a writer can restore a file's size and mtime, but not this. It
does not know what the files are.
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
"""Two changes within one tick of the kernel's clock have the same time; its slowest takes 10 ms."""
Stamp = tuple[int, ...]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_digest(paths: list[Path], compute: Callable[[], str]) -> str:
    """Return the digest that `compute` makes of these files: gigabytes are read once, not at every
    start."""
    before = settled_stamps(paths)
    names = "\0".join(str(path.resolve()) for path in paths)
    note = home() / "digests" / hashlib.sha256(f"{names}\0{before}".encode()).hexdigest()
    try:
        if re.fullmatch(r"[0-9a-f]{64}", digest := note.read_text(encoding="ascii")):
            return digest
    except (OSError, UnicodeDecodeError):
        # No note, or not one of ours: compute the digest.
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
    """Facts of the files that change when their bytes do."""
    return [
        (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for status in map(os.stat, paths)
    ]


def settled_stamps(paths: Iterable[Path]) -> list[Stamp]:
    """The stamps, after the clock has moved on: the next change will show."""
    settled = stamps(paths)
    if any(abs(time.time_ns() - stamp[-1]) < CLOCK_NS for stamp in settled):
        time.sleep(CLOCK_NS / 1e9)
    return settled
