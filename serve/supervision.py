"""Runs the service in a child process, and guarantees that all its processes end.

A process with Ray in it could block, abort or be stopped, and leave Ray's processes behind. This
parent does not import Ray: it forwards the first signal, waits a limited time, and ends every
process of the service. It knows no settings and no HTTP.
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
"""Time for Ray's shutdown, after the time for requests in flight."""
LEAVE_S = 2.0
"""Time for remaining processes after the service has ended."""
END_S = 3.0
SIGNALLED: Mapping[int, int] = {-signal.SIGTERM: 0, signal.SIGTERM: 0}
"""Python's and Ray's exit codes of a service that got SIGTERM before it had a handler, and the exit
codes to return for them."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def supervise(
    service: Callable[[], int],
    shutdown_s: float,
    say: Callable[[str], None],
    *,
    signalled: Mapping[int, int] = SIGNALLED,
) -> int:
    """Run `service` in a child process; both processes return its exit code.

    `signalled` maps the exit codes of a service that a signal ended to those to return.
    """
    if sys.platform != "linux":
        return service()
    adopt_orphans()
    # A signal that is already ignored, as under `nohup`, stays ignored.
    watched = {number for number in TERMINATING if signal.getsignal(number) != signal.SIG_IGN}
    watched.add(signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    sys.stdout.flush()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.setsid()
        end_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return service()
    try:
        return watch(child, watched, shutdown_s, say, signalled)
    finally:
        end_all()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch(
    child: int,
    watched: Collection[int],
    shutdown_s: float,
    say: Callable[[str], None],
    signalled: Mapping[int, int],
) -> int:
    """Forward the first signal to the child and wait for its end; return the exit code."""
    until_s: float | None = None
    while True:
        left_s = 1.0 if until_s is None else min(max(until_s - time.monotonic(), 0.0), 1.0)
        received = signal.sigtimedwait(watched, left_s)
        if (code := reap(child)) is not None:
            wait_for_leavers()
            if until_s is not None and code in signalled:
                return signalled[code]
            return code if code >= 0 else 1
        number = received.si_signo if received else None
        if number in TERMINATING and until_s is None:
            until_s = time.monotonic() + shutdown_s + MARGIN_S
            os.kill(child, signal.SIGTERM)
        elif number == signal.SIGINT:
            # After a second Ctrl-C, do not wait.
            until_s = time.monotonic()
        if until_s is not None and time.monotonic() >= until_s:
            say("the service does not end by itself: ending every process")
            return 1


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Make the kernel send this process SIGTERM when the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def reap(child: int) -> int | None:
    """Reap all ended children; return this child's exit code if it has ended, negative for a
    signal."""
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
    """Kill every descendant, also stopped ones and those started meanwhile."""
    until_s = time.monotonic() + END_S
    while (left := descendants()) and time.monotonic() < until_s:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        reap(0)


def descendants() -> list[int]:
    """Return all descendants, including zombies, whose threads may still hold a port."""
    parents = dict(processes(has_zombies=True))
    pids: list[int] = []
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        pids += generation
    return pids


def processes(*, has_zombies: bool = False) -> Iterator[tuple[int, int]]:
    """Yield each process with its parent."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = _stat(folder)
            if has_zombies or state != "Z":
                yield int(folder.name), int(parent)


def is_running(pid: int) -> bool:
    try:
        return _stat(Path("/proc", str(pid)))[0] != "Z"
    except OSError:
        return False


def _stat(folder: Path) -> tuple[str, str]:
    """Return a process's state and parent."""
    # The process's name before these fields may contain brackets.
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return state, parent
