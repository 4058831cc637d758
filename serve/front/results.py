"""Pictures that clients fetch by URL: files with names that cannot be guessed, kept for a limited
time and up to a total size. Front ends on several machines must share the folder, so that each
finds every picture. It knows no HTTP.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sdxl.files import OutputError, prepare_folder, write_atomic
from sdxl.params import InvalidParams
from serve.errors import Problem

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_-]{43}\.(png|jpeg|webp)")
MARK = ".shared"
SWEEP_S = 10.0
"""How often the folder is searched for expired files, and for files of other processes."""
KEPT = 0.9
"""Share of a full store that is kept, so that the next pictures need not list all files."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def folder_of(results_dir: str) -> Path:
    return Path(results_dir) if results_dir else private_folder()


def private_folder() -> Path:
    """Return a temporary folder that no other user can list, since a name gives access."""
    folder = Path(tempfile.gettempdir()) / f"sdxl-results-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700)
    status = folder.lstat() if folder.is_dir() else None
    if status is None or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise InvalidParams(
            "results_dir",
            str(folder),
            "must be a folder that no other user can write to; name another",
        )
    folder.chmod(0o700)
    return folder


def mark(folder: Path) -> str:
    """Return a text that identifies this folder on every machine."""
    prepare_folder(folder)
    with suppress(FileExistsError), (folder / MARK).open("x") as file:
        file.write(secrets.token_hex(16))
    return (folder / MARK).read_text()


def check_shared(results_dir: str, expected: str) -> None:
    """Raise InvalidParams if this node's folder is not the marked one."""
    folder = folder_of(results_dir)
    found = ""
    with suppress(OSError):
        found = (folder / MARK).read_text()
    if found != expected:
        needed = "must be one folder that all nodes share; this node has another"
        raise InvalidParams("results_dir", str(folder), needed)


def full() -> Problem:
    message = "There is no room for `url` results; `b64_json` needs none."
    return Problem(507, message, "response_format", "results_full", 30.0)


def unwritable() -> Problem:
    message = "The service cannot write `url` results; `b64_json` needs no place for them."
    return Problem(507, message, "response_format", "results_unwritable", 30.0)


@dataclass
class ResultStore:
    folder: Path
    ttl_s: float
    max_bytes: int
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        prepare_folder(self.folder)
        self._swept_s, self._held = float("-inf"), 0

    def check_room(self, size: int) -> None:
        """Raise Problem 507 if even the emptied store could not keep `size` bytes."""
        if not os.access(self.folder, os.W_OK):
            raise unwritable()
        self._sweep(room=0)
        if size > min(shutil.disk_usage(self.folder).free + self._held, self.max_bytes):
            raise full()

    def put(self, file: bytes, format: str) -> str:
        """Store a file and return its name. On a full disk the oldest files are removed. Raises
        Problem 507 if that is not enough, or nothing can be written."""
        name = f"{secrets.token_urlsafe(32)}.{format}"
        while True:
            try:
                self._sweep(room=len(file))
                write_atomic(self.folder / name, file)
                break
            except OSError as error:
                if not (isinstance(error, OutputError) and error.number in FULL):
                    log.error("%s", error)
                    raise unwritable() from error
                if not self._sweep(len(file), freed=len(file)):
                    raise full() from error
        self._held += len(file)
        return name

    def get(self, name: str) -> bytes | None:
        """Return a picture; None if it does not exist or has expired."""
        if not NAME.fullmatch(name):
            return None
        path = self.folder / name
        try:
            age_s = self.clock() - path.stat().st_mtime
            return path.read_bytes() if age_s <= self.ttl_s else None
        except OSError:
            return None

    def _sweep(self, room: int, freed: int = 0) -> bool:
        """Remove expired files, then the oldest until there is room and at least `freed` bytes are
        freed. Return whether there were files."""
        now = self.clock()
        is_recent = now - self._swept_s < SWEEP_S
        if is_recent and not freed and self._held + room <= self.max_bytes:
            return True
        files = sorted(self._files())
        self._swept_s, self._held = now, sum(size for _, size, _ in files)
        is_full = self._held + room > self.max_bytes
        most = (KEPT * self.max_bytes if is_full else self.max_bytes) - room
        most = min(most, self._held - freed) if freed else most
        for made_s, size, path in files:
            if now - made_s > self.ttl_s or self._held > most:
                # Another process may have removed the file.
                path.unlink(missing_ok=True)
                self._held -= size
        return bool(files)

    def _files(self) -> list[tuple[float, int, Path]]:
        files = []
        for path in self.folder.iterdir():
            if NAME.fullmatch(path.name):
                with suppress(OSError):
                    status = path.stat()
                    files.append((status.st_mtime, status.st_size, path))
        return files
