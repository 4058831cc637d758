"""Whether finished pictures are still what the ledger says, without reading them all back.

A file that is there in its size is believed, and one in a hundred is read whole. One that differs
ends the belief: from then on all are read. It makes nothing and writes nothing.
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
"""the share of files that is read, besides a worker's first"""


class FinishedPictures:
    """`reads_all`: believe nothing, read everything."""

    def __init__(self, store: Store, reads_all: bool, seed: str) -> None:
        self.reads_all = reads_all
        self._store, self._read = store, reader(store)
        self._random = random.Random(seed)
        self._has_read = False

    def there(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those whose file is there, and as long as it was written; a listing tells. A tar is at
        least as long as what lies in it."""
        sizes: dict[str, int] = {}
        for place in {place_of(entry) for entry in entries}:
            sizes |= self._store.sizes(place)
        least = Counter[str]()
        for entry in entries:
            least[file_of(entry)] += entry.size
        return [entry for entry in entries if is_whole(entry, sizes, least)]

    def sample(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those to read: of a tar all, as it is read whole, or none."""
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
    """The file that holds it: its own, or a tar."""
    tar, is_inside, _ = entry.file.partition(TAR)
    return f"{tar}.tar" if is_inside else entry.file


def place_of(entry: Entry) -> str:
    """What to list: a tar itself, or its folder."""
    file = file_of(entry)
    return file if file != entry.file else file.rpartition("/")[0]


def is_whole(entry: Entry, sizes: Mapping[str, int], least: Mapping[str, int]) -> bool:
    file = file_of(entry)
    if file not in sizes:
        return False
    return sizes[file] == entry.size if file == entry.file else sizes[file] >= least[file]
