"""One start of a job at a time in its place, and whether one is at work there now."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sdxl.files import OutputError
from sdxl.params import InvalidParams
from serve.batch.store import FolderStore, Store

LOCK = "lock"
LEAVE_S = 10.0
"""An interrupted driver has so long to end its workers."""


@contextmanager
def locked(out: str) -> Iterator[Callable[[], None]]:
    """One start at a time. What it gives raises BatchFailed once another has taken it over."""
    with _locked_bucket(out) if "://" in out else _locked_folder(out) as check:
        yield check


@contextmanager
def _locked_bucket(out: str) -> Iterator[Callable[[], None]]:
    # Here and not above: a folder needs nothing of fsspec.
    from serve.batch.bucket_lock import BucketLock
    from serve.batch.object_store import ObjectStore

    lock = BucketLock(ObjectStore(out))
    lock.take()
    try:
        yield lock.check
    finally:
        lock.leave()


@contextmanager
def _locked_folder(out: str) -> Iterator[Callable[[], None]]:
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
        yield _held


def _held() -> None:
    """Nobody can take a file's lock from who has it."""


def is_free(store: Store) -> bool:
    """Whether nobody of this machine is at work there. A file's lock falls with whoever held it,
    however that ended."""
    if not isinstance(store, FolderStore):
        from serve.batch.bucket_lock import is_left
        from serve.batch.object_store import ObjectStore

        assert isinstance(store, ObjectStore)
        return is_left(store)
    try:
        with Path(store.root, LOCK).open("rb") as file:
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
