"""sha256 of files, and what tells that a file has not changed since.

The time of change is the kernel's (ctime): who may write a file can set its size and its time of
modification back, but not this one. It does not know what the files are.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from engines.folders.places import home
from sdxl.checkpoint import NETWORK_FOLDERS, Checkpoint
from sdxl.files import OutputError, prepare_folder, write_atomic

CLOCK_NS = 50_000_000
"""Two changes within one tick of the kernel's clock have the same time; its slowest takes 10 ms."""
Stamp = tuple[int, ...]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_digest(checkpoint: Checkpoint) -> str:
    """`Checkpoint.digest`, computed once: gigabytes of weights need not be read at every start."""
    files = [
        path
        for part in NETWORK_FOLDERS
        for path in (checkpoint.folder / part / "config.json", *checkpoint.weight_files(part))
    ]
    before = settled_stamps(files)
    names = "\0".join(str(path.resolve()) for path in files)
    key = hashlib.sha256(f"{names}\0{before}".encode()).hexdigest()
    remembered = home() / "digests" / key
    try:
        if re.fullmatch(r"[0-9a-f]{64}", digest := remembered.read_text(encoding="ascii")):
            return digest
    except (OSError, UnicodeDecodeError):
        # Not there, or not ours: computed anew.
        pass
    digest = checkpoint.digest
    if stamps(files) != before:
        return digest
    try:
        prepare_folder(remembered.parent)
        write_atomic(remembered, digest.encode())
    except OutputError:
        # Nowhere to remember it: the next start takes as long as this one.
        pass
    return digest


def stamps(paths: Iterable[Path]) -> list[Stamp]:
    """What changes with a file's bytes, whoever changes them."""
    return [
        (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for status in map(os.stat, paths)
    ]


def settled_stamps(paths: Iterable[Path]) -> list[Stamp]:
    """These, once the clock that they are written by has gone on: the next change shows."""
    found = stamps(paths)
    if any(abs(time.time_ns() - stamp[-1]) < CLOCK_NS for stamp in found):
        time.sleep(CLOCK_NS / 1e9)
    return found
