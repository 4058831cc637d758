"""Writes files atomically, and reads TOML."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sdxl.parameter import InvalidParams


class OutputError(OSError):
    """A path cannot be written; the message has the reason."""

    def __init__(
        self, path: Path | str, cause: OSError, needed: str = "a place that can be written"
    ):
        super().__init__(f"out must be {needed}, got {str(path)!r} ({cause.strerror or cause})")
        self.path, self.number = path, cause.errno
        self._arguments = path, cause, needed

    def __reduce__(self) -> Any:
        return OutputError, self._arguments


def read_toml(field: str, file: Path | str) -> dict[str, Any]:
    """Read a TOML file, or raise InvalidParams for the field that names it."""
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise InvalidParams(field, str(file), f"must be a TOML file ({cause})") from error


def read_entries(field: str, file: Path | str, kind: str) -> list[tuple[str, str]]:
    """Read the lines of an operator's file without comments, each after its place for errors; raise
    InvalidParams for the field that names the file."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        needed = f"must be a readable file of {kind} ({cause})"
        raise InvalidParams(field, str(file), needed) from error
    texts = [line.partition("#")[0].strip() for line in lines]
    return [(f"{file}, line {number}", text) for number, text in enumerate(texts, 1) if text]


def write_atomic(path: Path, data: bytes, scratch: Path | None = None) -> None:
    """Write a temporary file, sync, and rename, so that readers see the old file or the new one.
    The temporary file is beside the target, or in a scratch folder of the same file system."""
    temporary = (scratch or path.parent) / f".{secrets.token_hex(8)}.tmp"
    try:
        try:
            _write_synced(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(path, error) from error


def write_json(path: Path, content: Any, end: str = "\n", **style: Any) -> None:
    """Write JSON atomically; `style` are arguments of json.dumps."""
    write_atomic(path, (json.dumps(content, **{"indent": 1, **style}) + end).encode())


def prepare_folder(folder: Path) -> None:
    """Create a folder and check that files can be written there, before hours of work."""
    probe = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise OutputError(folder, error, "a folder that can be written") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which other processes wait for and the process's end releases."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def grant_usual(path: Path) -> None:
    """Give a file that a library made private the permissions of the umask, because the service
    often runs as another user."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _write_synced(path: Path, data: bytes) -> None:
    # os.open, unlike tempfile, applies the user's umask.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
