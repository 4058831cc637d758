"""Checks finished pictures against the ledger without reading all of them.

A listing compares sizes, and one file in a hundred is read; after one that differs all are read.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from serve.batch.ledger import Entry
from serve.batch.store import Store
from serve.batch.tars import TAR, reader

SAMPLED = 0.01
"""the share of files that a worker reads, besides its first"""


class FinishedPictures:
    def __init__(self, store: Store, reads_all: bool, seed: str) -> None:
        self.reads_all = reads_all
        self._store, self._read = store, reader(store)
        self._random = random.Random(seed)
        self._has_read = False

    def there(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return those whose file has its size in a listing, and whose tar is long enough."""
        sizes: dict[str, int] = {}
        for place in {place_of(entry) for entry in entries}:
            sizes |= self._store.sizes(place)
        least = Counter[str]()
        for entry in entries:
            least[file_of(entry)] += entry.size
        return [entry for entry in entries if is_whole(entry, sizes, least)]

    def sample(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return those to read. A tar is read whole, so all of it or nothing is chosen."""
        chosen: dict[str, bool] = {}
        return [e for e in entries if chosen.setdefault(file_of(e), self._is_chosen())]

    def is_sound(self, entry: Entry) -> bool:
        try:
            return hashlib.sha256(self._read(entry.file)).hexdigest() == entry.sha256
        except FileNotFoundError:
            return False

    def _is_chosen(self) -> bool:
        is_first, self._has_read = not self._has_read, True
        return self.reads_all or is_first or self._random.random() < SAMPLED


def file_of(entry: Entry) -> str:
    """Return the file that holds a picture: its own, or a tar."""
    tar, is_inside, _ = entry.file.partition(TAR)
    return f"{tar}.tar" if is_inside else entry.file


def place_of(entry: Entry) -> str:
    """Return what to list: the tar itself, or the picture's folder."""
    file = file_of(entry)
    return file if file != entry.file else file.rpartition("/")[0]


def is_whole(entry: Entry, sizes: Mapping[str, int], least: Mapping[str, int]) -> bool:
    file = file_of(entry)
    if file not in sizes:
        return False
    return sizes[file] == entry.size if file == entry.file else sizes[file] >= least[file]
