"""Peak memory of the process, and release of freed memory."""

from __future__ import annotations

import ctypes
import gc
import resource
from contextlib import suppress

PEAK = "VmHWM:"


def peak_bytes() -> int:
    """Return this process's peak; getrusage of a child includes its parent's."""
    with suppress(OSError), open("/proc/self/status", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(PEAK):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_back() -> None:
    """Return freed memory to the system: glibc keeps gigabytes of a deleted model."""
    gc.collect()
    trim()


def trim() -> None:
    """`give_back` without garbage collection, which takes long in a large process."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
