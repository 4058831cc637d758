"""A lock: only one run at a time works on a job.

In a folder it is a file lock, which the system frees when the process ends. An object store has no
locks: there each run creates an object below lock/, with the next free number and only if that
object does not exist, and rewrites it every `RENEW_S`. Another run may follow once the holder has
marked its object as over, or has not rewritten it for `OLD_S`. Only one run gets the next number; a
holder that was suspended finds the higher number. No two machines' clocks are compared.

If a store ignores the condition (no If-None-Match), two runs that start at the same moment may both
work until one of them finds the other's object, at most for `RENEW_S`. They write the same bytes
under the same names.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from sdxl.files import OutputError
from sdxl.params import InvalidParams
from serve.batch.batch_spec import BatchFailed
from serve.batch.store import ObjectStore, Store, token

log = logging.getLogger(__name__)

LOCK = "lock"
LEAVE_S = 10.0
"""An interrupted run has this long to end its workers."""
RENEW_S, OLD_S = 10.0, 60.0
LOOK_S = 1.0
"""How often a waiting run checks whether the holder is alive."""
TAKEN = "cannot be used: another sdxl batch writes there"


@contextmanager
def locked(out: str) -> Iterator[Callable[[], None]]:
    """Hold the lock of a place. Yield a check that raises BatchFailed once the lock is lost."""
    if "://" not in out:
        with _locked_folder(out):
            # A file lock cannot be lost.
            yield lambda: None
        return
    lock = BucketLock(ObjectStore(out))
    lock.take()
    try:
        yield lock.check
    finally:
        lock.leave()


@contextmanager
def _locked_folder(out: str) -> Iterator[None]:
    path = Path(out, LOCK)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise OutputError(path.parent, error, "a folder that can be written") from error
    with file:
        # An interrupted run may still record its last pictures.
        until_s = time.monotonic() + LEAVE_S
        while not _lock(file, fcntl.LOCK_EX):
            if time.monotonic() > until_s:
                raise InvalidParams("out", out, TAKEN)
            time.sleep(0.1)
        yield


def is_free(store: Store) -> bool:
    """Return whether no process of this machine holds the lock; other machines are not checked."""
    if isinstance(store, ObjectStore):
        turn = BucketLock(store).last()[1]
        if turn is None or turn.is_over:
            return True
        return turn.host == socket.gethostname() and not Path("/proc", str(turn.pid)).exists()
    try:
        with Path(store.root, LOCK).open("rb") as file:
            return _lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _lock(file: IO[Any], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class LockTurn:
    """The content of an object below lock/."""

    run: str
    host: str
    pid: int
    renewals: int = 0
    is_over: bool = False

    @property
    def name(self) -> str:
        return f"process {self.pid} on {self.host}"

    def as_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class BucketLock:
    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._number = 0
        self._turn = LockTurn(token(), socket.gethostname(), os.getpid())
        self._lost = ""
        self._is_left = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lock", daemon=True)

    def take(self) -> None:
        """Take the lock; raise InvalidParams as soon as a holder shows that it is alive."""
        number, turn = self.last()
        if turn is not None and not turn.is_over:
            self._watch(number, turn)
        self._number = number + 1
        self.store.create(self._path(self._number), self._turn.as_json())
        # The answer to `create` may be lost, and some stores replace an existing object.
        if not self._is_held():
            raise self._refusal(self.last()[1])
        for old in self._numbers():
            if old < self._number:
                self.store.remove(self._path(old))
        self._thread.start()

    def check(self) -> None:
        if self._lost:
            raise BatchFailed(self._lost)

    def leave(self) -> None:
        self._is_left.set()
        self._thread.join(RENEW_S)
        try:
            self._write(is_over=True)
        except Exception as error:
            # The store may have stopped the job. The next run then waits for `OLD_S`.
            log.warning("%s: cannot release the lock (%s)", self.store.url, error)

    def last(self) -> tuple[int, LockTurn | None]:
        """Return the highest number and the content of its object."""
        number = max(self._numbers(), default=0)
        return number, self._read(number)

    # -- the holder -------------------------------------------------------------------------

    def _renew(self) -> None:
        while not self._is_left.wait(RENEW_S) and not self._lost:
            try:
                self._write(is_over=False)
            except Exception as error:
                log.warning("%s: cannot renew the lock (%s)", self.store.url, error)

    def _write(self, is_over: bool) -> None:
        if not self._is_held():
            turn = self.last()[1]
            cause = "the job was removed"
            if turn is not None:
                cause = f"{turn.name} took over the job, as this one did not renew its lock"
            self._lost = f"{self.store.url}: {cause}"
            return
        turn = replace(self._turn, renewals=self._turn.renewals + 1, is_over=is_over)
        self.store.put(self._path(self._number), turn.as_json())
        self._turn = turn

    def _is_held(self) -> bool:
        """Read this run's object by name, since a listing may be stale."""
        turn = self._read(self._number)
        is_mine = turn is not None and turn.run == self._turn.run
        return is_mine and max(self._numbers(), default=0) <= self._number

    # -- a waiting run ----------------------------------------------------------------------

    def _watch(self, number: int, turn: LockTurn) -> None:
        """Wait until the holder's turn is over or old; raise if the holder is alive."""
        message = "%s: %s did not release the lock; waiting %g s for a sign of life"
        log.warning(message, self.store.url, turn.name, OLD_S)
        until_s = time.monotonic() + OLD_S
        while time.monotonic() < until_s:
            time.sleep(LOOK_S)
            last, now = self.last()
            if last == number and now is not None and now.is_over:
                return
            if last != number or now != turn:
                raise self._refusal(now)

    def _refusal(self, holder: LockTurn | None) -> InvalidParams:
        name = f" ({holder.name})" if holder is not None else ""
        return InvalidParams("out", self.store.url, f"{TAKEN}{name}")

    # -- the objects ------------------------------------------------------------------------

    def _read(self, number: int) -> LockTurn | None:
        with suppress(FileNotFoundError, TypeError, ValueError):
            return LockTurn(**json.loads(self.store.get(self._path(number))))
        return None

    def _numbers(self) -> list[int]:
        return [int(name) for name in self.store.names(LOCK) if name.isdecimal()]

    def _path(self, number: int) -> str:
        return f"{LOCK}/{number:08d}"
