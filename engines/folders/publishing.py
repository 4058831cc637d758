"""Folders that appear whole or not at all, made by one process at a time.

The kernel releases the lock when its process ends, so a killed build needs no cleanup. It does not
know the folders' content.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sdxl.files import OutputError


class Busy(RuntimeError):
    """Another process is making the same folder."""


@contextmanager
def disk_errors(target: Path, needed: str = "a place that can be written") -> Iterator[None]:
    """Raise errors of the file system as errors of the target."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(target, error, needed) from error


@contextmanager
def locked(target: Path, *, waits: bool) -> Iterator[None]:
    """Lock `target` for one process. If another process holds the lock, wait or raise Busy."""
    if not target.absolute().name:
        raise OutputError(target, OSError(errno.EINVAL, "it has no name"), "a folder with a name")
    path = target.absolute().with_name(f".{target.absolute().name}.lock")
    with disk_errors(target, "a folder that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise Busy(
                f"{target}: being made by {holder}; wait until it has ended, or stop it"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def publish(finished: Path, target: Path) -> None:
    """Move a finished folder to `target` and remove the older one. Call under `locked`."""
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    with disk_errors(target):
        try:
            sync_folder(finished)
            if target.exists():
                os.rename(target, old)
            os.rename(finished, target)
            _sync(target.parent)
        except BaseException:
            if old.exists() and not target.exists():
                os.rename(old, target)
            raise
    shutil.rmtree(old, ignore_errors=True)


def refuse_other_folder(folder: Path, mark: str, kind: str) -> None:
    """Refuse to replace a folder with other content. The file `mark` marks folders of this kind."""
    if folder.exists() and not (folder / mark).exists() and any(folder.iterdir()):
        cause = FileExistsError(errno.EEXIST, "there is something else in it")
        raise OutputError(folder, cause, f"a new or empty folder, or {kind}")


def sync_folder(folder: Path) -> None:
    """Flush a folder's files to the disk before it is published."""
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def link_or_copy(source: Path, target: Path) -> None:
    """Link a file under another name. Copy it if the file system allows no link."""
    real = source.resolve()
    with disk_errors(target):
        try:
            os.link(real, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            shutil.copyfile(real, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
