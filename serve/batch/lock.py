"""One start of a job at a time in a folder, and whether one is at work there now."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sdxl.files import OutputError
from sdxl.params import InvalidParams

LOCK = "lock"
LEAVE_S = 10.0
"""An interrupted driver has so long to end its workers."""


@contextmanager
def locked(out: str) -> Iterator[None]:
    """One start at a time in a folder. In an object store two would write the same bytes twice."""
    if "://" in out:
        yield
        return
    path = Path(out, LOCK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise OutputError(path.parent, error, "a folder that can be written") from error
    with file:
        # One that was killed may still note what it has.
        until_s = time.monotonic() + LEAVE_S
        while not _lock(file):
            if time.monotonic() > until_s:
                raise InvalidParams("out", out, "another sdxl batch is at work there")
            time.sleep(0.1)
        yield


def is_free(out: Path) -> bool:
    """Whether nobody of this machine is at work there: the lock falls with whoever held it, however
    that ended."""
    try:
        with Path(out, LOCK).open("rb") as file:
            return _lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _lock(file: IO[Any], kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
