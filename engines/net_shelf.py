"""ControlNets or image adapters of requests: loaded when a request asks for one, kept while it
runs, and dropped for others when their memory is full, the least recently used first."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from engines.bank_shelf import FIRST_BYTES_S, START_S
from engines.file_loading import reading, weighed
from sdxl.adapters import LoadedFile, NoRoom
from sdxl.catalogue import FIELDS, AdapterFile
from sdxl.checkpoint import Checkpoint
from sdxl.cost import smoothed
from sdxl.params import InvalidParams

GPU_SHARE, CPU_SHARE = 0.15, 0.25
"""of the device's memory for ControlNets, and for image adapters"""
_numbers = itertools.count()


def room_bytes(device: torch.device) -> int:
    """Return the memory of a shelf. One file always fits."""
    if device.type == "cuda":
        return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return int(CPU_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def room_on(device: torch.device, dtype: str) -> tuple[int, int, Callable[[], None]]:
    """Return the memory of a shelf, the bytes of a weight, and what waits for the device."""
    is_cuda = device.type == "cuda"
    wait = partial(torch.cuda.synchronize, device) if is_cuda else NetShelf.synchronize
    return room_bytes(device), getattr(torch, dtype).itemsize, wait


class FileHeader(Protocol):
    @property
    def numbers(self) -> int:
        """How many numbers the networks hold."""
        ...


R = TypeVar("R", bound=FileHeader)
T = TypeVar("T", bound=LoadedFile)
Make = Callable[[AdapterFile, Mapping[str, str], int], T]
"""makes a lease of file, digests and number"""


@dataclass(eq=False)
class _LoadedNet(Generic[T]):
    make: Make[T]
    bytes: int
    digests: Mapping[str, str]
    number: int = field(default_factory=_numbers.__next__)
    leases: int = 0


@dataclass
class NetShelf(Generic[R, T]):
    """Implements sdxl.adapters.Shelf."""

    checkpoint: Checkpoint
    read: Callable[[Path, Checkpoint], R]
    """reads a file's header"""
    load: Callable[[R], Make[T]]
    room: int
    """bytes of weights"""
    number_bytes: int = 4
    """of one weight"""
    synchronize: Callable[[], None] = lambda: None
    """waits for the device, which may still read what is dropped"""
    byte_s: float = FIRST_BYTES_S
    loads: int = 0
    _loaded: OrderedDict[AdapterFile, _LoadedNet[T]] = field(default_factory=OrderedDict)
    """the least recently used first"""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def delay_s(self, files: Sequence[AdapterFile]) -> float:
        start_s = START_S if files and not self.loads else 0.0
        return start_s + self.byte_s * sum(weighed(file) for file in {*files} - {*self._loaded})

    def lease(self, files: Sequence[AdapterFile]) -> dict[str, T]:
        with self._lock:
            return {file.name: self._leased(file, files) for file in files}

    def _leased(self, file: AdapterFile, together: Sequence[AdapterFile]) -> T:
        if file not in self._loaded:
            began = time.perf_counter()
            self._loaded[file] = self._load(file, together)
            byte_s = (time.perf_counter() - began) / weighed(file)
            self.byte_s = smoothed(self.byte_s if self.loads else None, byte_s)
            self.loads += 1
        self._loaded.move_to_end(file)
        loaded = self._loaded[file]
        net = loaded.make(file, loaded.digests, loaded.number)
        loaded.leases += 1
        weakref.finalize(net, self._release, loaded)
        return net

    def _release(self, loaded: _LoadedNet[T]) -> None:
        with self._lock:
            loaded.leases -= 1

    def _load(self, file: AdapterFile, together: Sequence[AdapterFile]) -> _LoadedNet[T]:
        with reading(file):
            read = self.read(file.path, self.checkpoint)
            size = read.numbers * self.number_bytes
            self._make_room(size, file, together)
            make, digests = self.load(read), file.digests
        return _LoadedNet(make, size, digests)

    def _make_room(self, size: int, file: AdapterFile, together: Sequence[AdapterFile]) -> None:
        """Drop unused files until this one fits. A request that alone needs more is refused."""
        while self._loaded and self.room < size + sum(e.bytes for e in self._loaded.values()):
            unused = next((f for f, each in self._loaded.items() if not each.leases), None)
            if unused is None and self._loaded.keys() <= {*together}:
                needed = f"must take at most {self.room / 2**30:.3g} GiB together; name fewer"
                raise InvalidParams(FIELDS[file.kind], None, needed)
            if unused is None:
                raise NoRoom(f"other requests leave no room for {file.name!r}; try again")
            self.synchronize()
            del self._loaded[unused]
