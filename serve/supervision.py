"""The process that users start; it runs the service in a child process and guarantees its end.

Ray in the same process could block, abort or be stopped, and leave its processes behind. This
process loads none of it: it forwards the first signal, waits a limited time, and ends every process
of the service. It knows no settings and no HTTP.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

TERMINATING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MARGIN_S = 6.0
"""Beyond the time of requests in flight: Ray's shutdown."""
LEAVE_S = 2.0
"""Time for remaining processes after the service has ended."""
END_S = 3.0
SIGNALLED: Mapping[int, int] = {-signal.SIGTERM: 0, signal.SIGTERM: 0}
"""Exit codes of a service that was signalled before it had a handler, Python's and Ray's, and what
they become."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def supervise(
    service: Callable[[], int],
    shutdown_s: float,
    say: Callable[[str], None],
    *,
    signalled: Mapping[int, int] = SIGNALLED,
) -> int:
    """Run `service` in a child process; both processes return its exit code.

    `signalled` maps exit codes that only mean that a signal ended the service.
    """
    if sys.platform != "linux":
        return service()
    adopt_orphans()
    # A signal that this process inherited as ignored, as from `nohup`, stays ignored.
    watched = {number for number in TERMINATING if signal.getsignal(number) != signal.SIG_IGN}
    watched.add(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    sys.stdout.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.setsid()
        end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return service()
    try:
        return Supervisor(child, shutdown_s, say, signalled).wait(watched)
    finally:
        end_all()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Supervisor:
    def __init__(
        self,
        child: int,
        shutdown_s: float,
        say: Callable[[str], None],
        signalled: Mapping[int, int],
    ) -> None:
        self.child, self.shutdown_s, self.say, self.signalled = child, shutdown_s, say, signalled
        self._until_s: float | None = None
        """the deadline after a signal"""

    def wait(self, watched: Collection[int]) -> int:
        """Return the exit code: 0 if the service ended in time after a signal."""
        while True:
            received = self._signal(watched)
            if (code := reap(self.child)) is not None:
                wait_for_leavers()
                return self._meaning(code)
            if received in TERMINATING:
                self._pass_on(received)
            if self._until_s is not None and time.monotonic() >= self._until_s:
                self.say("it does not end by itself: ending every process")
                return 1

    def _signal(self, watched: Collection[int]) -> int | None:
        left_s = 1.0 if self._until_s is None else self._until_s - time.monotonic()
        received = signal.sigtimedwait(watched, min(max(left_s, 0.0), 1.0))
        return received.si_signo if received else None

    def _pass_on(self, received: int) -> None:
        if self._until_s is None:
            self._until_s = time.monotonic() + self.shutdown_s + MARGIN_S
            os.kill(self.child, signal.SIGTERM)
        elif received == signal.SIGINT:
            # A second Ctrl-C means: do not wait.
            self._until_s = time.monotonic()

    def _meaning(self, code: int) -> int:
        if self._until_s is not None and code in self.signalled:
            return self.signalled[code]
        return code if code >= 0 else 1


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with(parent: int) -> None:
    """Receive SIGTERM when the parent is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def reap(child: int) -> int | None:
    """Return this child's exit code if it has ended, below 0 for a signal. Other children are
    reaped too."""
    code = None
    with suppress(ChildProcessError):
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                break
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
    return code


def wait_for_leavers() -> None:
    until_s = time.monotonic() + LEAVE_S
    while descendants() and time.monotonic() < until_s:
        time.sleep(0.05)
        reap(0)


def end_all() -> None:
    """End every descendant, also stopped ones and those that they start meanwhile."""
    until_s = time.monotonic() + END_S
    while (left := descendants()) and time.monotonic() < until_s:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        reap(0)


def descendants() -> list[int]:
    """Return all descendants, also ended ones until they are reaped: their threads may still hold a
    port."""
    parents = dict(processes(has_dead=True))
    found: list[int] = []
    fresh = {os.getpid()}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh}
        found += fresh
    return found


def processes(*, has_dead: bool = False) -> Iterator[tuple[int, int]]:
    """Return the parent of each live process."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = _stat(folder)
            if has_dead or state != "Z":
                yield int(folder.name), int(parent)


def lives(pid: int) -> bool:
    try:
        return _stat(Path("/proc", str(pid)))[0] != "Z"
    except OSError:
        return False


def _stat(folder: Path) -> tuple[str, str]:
    """Return a process's state and parent."""
    # The name before them may hold anything, brackets too.
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return state, parent
