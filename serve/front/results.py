"""Pictures that are fetched by their URL: on disk, for a while, up to a size, under names that
cannot be guessed. Several processes may share the folder; on several machines they must, or a
picture that one put is not found by another. It knows no HTTP.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sdxl.files import prepare_folder, write_atomic
from sdxl.params import InvalidParams

NAME = re.compile(r"[A-Za-z0-9_-]{43}\.(png|jpeg|webp)")
MARK = ".shared"
SWEEP_S = 10.0
"""Expired files are looked for this often at most."""


def folder_of(results_dir: str) -> Path:
    private = Path(tempfile.gettempdir()) / f"sdxl-results-{os.getuid()}"
    return Path(results_dir) if results_dir else private


def mark(folder: Path) -> str:
    """What tells this folder from every other, from whichever machine one looks."""
    prepare_folder(folder)
    with suppress(FileExistsError), (folder / MARK).open("x") as file:
        file.write(secrets.token_hex(16))
    return (folder / MARK).read_text()


def check_shared(results_dir: str, expected: str) -> None:
    """Raises InvalidParams unless the folder here is the one that was marked."""
    folder = folder_of(results_dir)
    try:
        is_same = (folder / MARK).read_text() == expected
    except OSError:
        is_same = False
    if not is_same:
        needed = "needed one folder that all nodes share; on this node it is another"
        raise InvalidParams("results_dir", str(folder), needed)


@dataclass
class ResultStore:
    folder: Path
    ttl_s: float
    max_bytes: int
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        prepare_folder(self.folder)
        self._swept_s = float("-inf")

    def put(self, file: bytes, format: str) -> str:
        """The name to fetch it by."""
        self._sweep(room=len(file))
        name = f"{secrets.token_urlsafe(32)}.{format}"
        write_atomic(self.folder / name, file)
        return name

    def get(self, name: str) -> bytes | None:
        """None if there never was one, or its time is over."""
        if not NAME.fullmatch(name):
            return None
        path = self.folder / name
        try:
            age_s = self.clock() - path.stat().st_mtime
            return path.read_bytes() if age_s <= self.ttl_s else None
        except OSError:
            return None

    def _sweep(self, room: int) -> None:
        """Remove what is over, then the oldest until there is room."""
        now = self.clock()
        files = self._files()
        total = sum(size for _, size, _ in files)
        if now - self._swept_s < SWEEP_S and total + room <= self.max_bytes:
            return
        self._swept_s = now
        for made_s, size, path in sorted(files, key=lambda f: f[0]):
            if now - made_s > self.ttl_s or total + room > self.max_bytes:
                # Another process may have been first.
                path.unlink(missing_ok=True)
                total -= size

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.folder.iterdir():
            if NAME.fullmatch(path.name):
                with suppress(OSError):
                    stat = path.stat()
                    found.append((stat.st_mtime, stat.st_size, path))
        return found
