"""How much memory a process has held at most, and giving back what it holds no longer."""

from __future__ import annotations

import ctypes
import gc
import resource
from contextlib import suppress

PEAK = "VmHWM:"


def peak_bytes() -> int:
    """This process's own peak. What getrusage says of a child begins with its parent's."""
    with suppress(OSError), open("/proc/self/status", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(PEAK):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_back() -> None:
    """To the system, what was freed: glibc keeps gigabytes of a model that is gone."""
    gc.collect()
    trim()


def trim() -> None:
    """The same without looking for garbage, which takes long in a large process."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
