"""The process's peak memory, and the return of freed memory to the system."""

from __future__ import annotations

import ctypes
import gc
import resource
from contextlib import suppress

PEAK = "VmHWM:"


def peak_bytes() -> int:
    """Return this process's peak. getrusage would include the parent's peak in a child."""
    with suppress(OSError), open("/proc/self/status", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(PEAK):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_back() -> None:
    """Return freed memory to the system; glibc would keep gigabytes of a deleted model."""
    gc.collect()
    trim()


def trim() -> None:
    """Do `give_back` without garbage collection, which is slow in a large process."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
