"""One start of a job at a time in an object store, which has no locks of its own.

Each start creates an object below lock/, whose name is the number after the last one's, and only if
nobody else has created it. Its holder rewrites it every `RENEW_S`. It may be followed once it says
that it is over, or nobody rewrote it for `OLD_S`. Of several that follow, one gets the number, and
a holder that slept meanwhile finds the higher one. No two machines' clocks are compared.

Where a store creates without asking (no If-None-Match), two that begin within one request of each
other may both believe that they hold it, until one of them finds the other's name: for `RENEW_S` at
most. What they write meanwhile has the same names and bytes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sdxl.params import InvalidParams
from serve.batch.driver import BatchFailed
from serve.batch.object_store import ObjectStore
from serve.batch.store import token

log = logging.getLogger(__name__)

LOCK = "lock"
RENEW_S, OLD_S = 10.0, 60.0
LOOK_S = 1.0
"""How often one that waits looks whether the holder lives."""


@dataclass(frozen=True)
class LockTurn:
    """What an object below lock/ says."""

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


def is_left(store: ObjectStore) -> bool:
    """Whether its holder said that it is over, or was a process of this machine that is no more. Of
    another machine's, silence alone tells."""
    turn = BucketLock(store).last()[1]
    if turn is None or turn.is_over:
        return True
    return turn.host == socket.gethostname() and not Path("/proc", str(turn.pid)).exists()


class BucketLock:
    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._number = 0
        self._turn = LockTurn(token(), socket.gethostname(), os.getpid())
        self._lost = ""
        self._is_left = threading.Event()
        self._thread = threading.Thread(target=self._renew_again, name="lock", daemon=True)

    def take(self) -> None:
        """Raises InvalidParams as soon as another shows that it lives."""
        number, turn = self.last()
        if turn is not None and not turn.is_over:
            self._watch(number, turn)
        self._number = number + 1
        self.store.create(self._path(self._number), self._turn.as_json())
        # The answer to `create` may have been lost, and some stores replace what is there.
        if not self._is_held():
            raise self._refusal(self.last()[1])
        for old in self._numbers():
            if old < self._number:
                self.store.remove(self._path(old))
        self._thread.start()

    def check(self) -> None:
        """That it is still held."""
        if self._lost:
            raise BatchFailed(self._lost)

    def leave(self) -> None:
        self._is_left.set()
        self._thread.join(RENEW_S)
        try:
            self._write(is_over=True)
        except Exception as error:
            # The store may be what ended the job. Whoever comes next has to wait.
            log.warning("%s: its lock could not be left (%s)", self.store.url, error)

    # -- its holder -------------------------------------------------------------------------

    def _renew_again(self) -> None:
        while not self._is_left.wait(RENEW_S) and not self._lost:
            try:
                self._write(is_over=False)
            except Exception as error:
                log.warning("%s: its lock could not be renewed (%s)", self.store.url, error)

    def _write(self, is_over: bool) -> None:
        if not self._is_held():
            self._lost = self._who_has_it()
            return
        turn = replace(self._turn, renewals=self._turn.renewals + 1, is_over=is_over)
        self.store.put(self._path(self._number), turn.as_json())
        self._turn = turn

    def _is_held(self) -> bool:
        """Its object is read by name: a listing may be late."""
        turn = self._read(self._number)
        is_mine = turn is not None and turn.run == self._turn.run
        return is_mine and max(self._numbers(), default=0) <= self._number

    def _who_has_it(self) -> str:
        _, turn = self.last()
        if turn is None:
            return f"{self.store.url}: the job was removed"
        return f"{self.store.url}: {turn.name} goes on with the job, as nothing was heard from here"

    # -- one that waits ---------------------------------------------------------------------

    def _watch(self, number: int, turn: LockTurn) -> None:
        """Until it is over, or old."""
        told = "%s: not ended by %s; waiting %g s for a sign of life"
        log.warning(told, self.store.url, turn.name, OLD_S)
        until_s = time.monotonic() + OLD_S
        while time.monotonic() < until_s:
            time.sleep(LOOK_S)
            last, now = self.last()
            if last != number or now is None:
                raise self._refusal(now)
            if now.is_over:
                return
            if now != turn:
                raise self._refusal(now)

    def _refusal(self, holder: LockTurn | None) -> InvalidParams:
        by = f" ({holder.name})" if holder is not None else ""
        needed = f"another sdxl batch is at work there{by}"
        return InvalidParams("out", self.store.url, needed)

    # -- what lies there --------------------------------------------------------------------

    def last(self) -> tuple[int, LockTurn | None]:
        """The newest number, and what its object says."""
        number = max(self._numbers(), default=0)
        return number, self._read(number)

    def _read(self, number: int) -> LockTurn | None:
        """None where there is none, or none that a lock wrote."""
        with suppress(FileNotFoundError, TypeError, ValueError):
            return LockTurn(**json.loads(self.store.get(self._path(number))))
        return None

    def _numbers(self) -> list[int]:
        return [int(name) for name in self.store.names(LOCK) if name.isdecimal()]

    def _path(self, number: int) -> str:
        return f"{LOCK}/{number:08d}"
