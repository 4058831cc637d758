"""ControlNets or image adapters of requests. A file is loaded when a request asks for it and kept
while the request runs. A full shelf drops the least recently used file."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from engines.control_weights import ControlFile, read_control
from engines.cuda.device import wait_for
from engines.file_loading import START_S, LoadingShelf, ShelvedFile, load_bytes, refuse_unreadable
from sdxl.adapters import ControlNet, LoadedFile, NoRoom
from sdxl.catalogue import FIELDS, AdapterFile
from sdxl.checkpoint import Checkpoint
from sdxl.engine import Engine
from sdxl.params import InvalidParams

GPU_SHARE, CPU_SHARE = 0.15, 0.25
"""a shelf's share of the device's memory"""
_numbers = itertools.count()


def room_on(device: torch.device, dtype: str) -> tuple[int, int, Callable[[], None]]:
    """Return the bytes of a shelf, the bytes of a weight, and a function that waits for the
    device."""
    number_bytes = getattr(torch, dtype).itemsize
    if device.type == "cuda":
        room = int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
        return room, number_bytes, partial(wait_for, device)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(CPU_SHARE * memory), number_bytes, NetShelf.synchronize


class FileHeader(Protocol):
    @property
    def numbers(self) -> int:
        """The number of weights."""
        ...


R = TypeVar("R", bound=FileHeader)
T = TypeVar("T", bound=LoadedFile)
Make = Callable[[AdapterFile, Mapping[str, str], int], T]
"""makes a lease from file, digests and number"""


@dataclass(eq=False)
class _LoadedNet(ShelvedFile, Generic[T]):
    make: Make[T]
    bytes: int
    number: int = field(default_factory=_numbers.__next__)


@dataclass
class NetShelf(LoadingShelf, Generic[R, T]):
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
    """waits for the device, which may still read weights that are to be dropped"""
    _loaded: OrderedDict[AdapterFile, _LoadedNet[T]] = field(default_factory=OrderedDict)
    """the least recently used first"""

    def delay_s(self, files: Sequence[AdapterFile]) -> float:
        start_s = START_S if files and not self.loads else 0.0
        return start_s + self.byte_s * sum(load_bytes(file) for file in {*files} - {*self._loaded})

    def lease(self, files: Sequence[AdapterFile]) -> dict[str, T]:
        with self._lock:
            return {file.name: self._lease_one(file, files) for file in files}

    def _lease_one(self, file: AdapterFile, together: Sequence[AdapterFile]) -> T:
        if file not in self._loaded:
            with self._timed(file):
                self._loaded[file] = self._load(file, together)
        self._loaded.move_to_end(file)
        loaded = self._loaded[file]
        net = loaded.make(file, loaded.digests, loaded.number)
        self._hold(loaded, net)
        return net

    def _load(self, file: AdapterFile, together: Sequence[AdapterFile]) -> _LoadedNet[T]:
        with refuse_unreadable(file):
            header = self.read(file.path, self.checkpoint)
            size = header.numbers * self.number_bytes
            self._make_room(size, file, together)
            make, digests = self.load(header), file.digests
        return _LoadedNet(make, size, digests=digests)

    def _make_room(self, size: int, file: AdapterFile, together: Sequence[AdapterFile]) -> None:
        """Drop unused files until this one fits. Refuse a request that needs more than the empty
        shelf has; one file always fits."""
        while self._loaded and self.room < size + sum(e.bytes for e in self._loaded.values()):
            unused = next((f for f, each in self._loaded.items() if not each.leases), None)
            if unused is None and self._loaded.keys() <= {*together}:
                needed = f"must take at most {self.room / 2**30:.3g} GiB together; name fewer"
                raise InvalidParams(FIELDS[file.kind], None, needed)
            if unused is None:
                raise NoRoom(f"other requests leave no room for {file.name!r}; try again")
            self.synchronize()
            del self._loaded[unused]


def control_shelf(
    checkpoint: Checkpoint,
    dtype: str,
    device: torch.device,
    load_engines: Callable[[ControlFile], Mapping[str, Engine]],
) -> NetShelf[ControlFile, ControlNet]:
    """Return a shelf of ControlNets."""

    def load(file: ControlFile) -> Make[ControlNet]:
        return partial(ControlNet, engines=load_engines(file), types=file.architecture.types)

    return NetShelf(checkpoint, read_control, load, *room_on(device, dtype))
