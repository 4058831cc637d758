"""What the shelves of adapters share: errors of files that requests name, the time to load them,
and leases of loaded files."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from engines.lora_weights import LoraError
from sdxl.catalogue import FIELDS, AdapterFile
from sdxl.cost import smoothed
from sdxl.params import InvalidParams

LEAST_BYTES = 2**20
"""A smaller file takes as long to load as this one."""
START_S = 2.0
"""seconds to prepare the first load"""
FIRST_BYTES_S = 1 / 2**29
"""seconds to load a byte, until it is measured"""


def load_bytes(file: AdapterFile) -> int:
    """Return the bytes that predict the time to load a file."""
    return max(file.bytes, LEAST_BYTES)


@contextmanager
def refuse_unreadable(file: AdapterFile) -> Iterator[None]:
    """Refuse the request's field if the block cannot read the file, or if the file changes while it
    is read."""
    try:
        yield
        if not file.is_unchanged:
            raise LoraError("changed while it was read; try again")
    except (LoraError, OSError) as error:
        reason = f"cannot be read ({error})" if isinstance(error, OSError) else str(error)
        needed = f"names {file.name!r}, which {reason}"
        raise InvalidParams(FIELDS[file.kind], None, needed) from error


@dataclass(eq=False, kw_only=True)
class ShelvedFile:
    digests: Mapping[str, str] = field(default_factory=dict)
    leases: int = 0


@dataclass(kw_only=True)
class LoadingShelf:
    byte_s: float = FIRST_BYTES_S
    loads: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def _timed(self, file: AdapterFile) -> Iterator[None]:
        """Measure the block, which loads the file."""
        began = time.perf_counter()
        yield
        byte_s = (time.perf_counter() - began) / load_bytes(file)
        self.byte_s = smoothed(self.byte_s if self.loads else None, byte_s)
        self.loads += 1

    def _hold(self, loaded: ShelvedFile, holder: object) -> None:
        """Count a lease until the holder is gone."""
        loaded.leases += 1
        weakref.finalize(holder, self._release, loaded)

    def _release(self, loaded: ShelvedFile) -> None:
        with self._lock:
            loaded.leases -= 1
