"""Checks finished pictures against the ledger without reading all of them.

It compares all sizes, and reads one file in a hundred. If one differs, it reads all files.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence

from sdxl.handover import in_threads
from serve.batch.ledger import Entry
from serve.batch.store import Store
from serve.batch.tars import TAR, THREADS, reader

SAMPLED = 0.01
"""The share of files that a worker reads, besides the first file."""


class FinishedPictures:
    def __init__(self, store: Store, reads_all: bool, seed: str) -> None:
        self.reads_all = reads_all
        self._store, self._read = store, reader(store)
        self._random = random.Random(seed)
        self._has_read = False

    def find_sound(self, entries: Sequence[Entry], on_progress: Callable[[], None]) -> list[Entry]:
        """Return the entries whose files agree with the ledger, by size and sample."""
        listed = self._with_right_size(entries)
        on_progress()

        def check(entry: Entry) -> bool:
            on_progress()
            try:
                return hashlib.sha256(self._read(entry.file)).hexdigest() == entry.sha256
            except FileNotFoundError:
                return False

        # Check all pictures of a tar or none, as a tar is read whole.
        chosen: dict[str, bool] = {}
        # Another thread, with another piece, may set `reads_all` meanwhile.
        reads_all = self.reads_all
        sample = [e for e in listed if chosen.setdefault(file_of(e), self._is_sampled())]
        checks = zip(sample, in_threads(check, sample, THREADS), strict=True)
        bad = {entry.ordinal for entry, is_sound in checks if not is_sound}
        if bad and not reads_all:
            self.reads_all = True
            return self.find_sound(entries, on_progress)
        return [entry for entry in listed if entry.ordinal not in bad]

    def _with_right_size(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries whose file has the right size. A tar must be at least as large as its
        pictures."""
        sizes, least = dict[str, int](), Counter[str]()
        for entry in entries:
            least[file_of(entry)] += entry.size
        # List each tar alone, and pictures by folder.
        tars = {file for file in least if file.endswith(".tar")}
        files = least.keys() - tars
        for place in tars | {file.rpartition("/")[0] for file in files}:
            sizes |= self._store.sizes(place)
        good = {f for f in tars if sizes.get(f, -1) >= least[f]}
        good |= {f for f in files if sizes.get(f) == least[f]}
        return [entry for entry in entries if file_of(entry) in good]

    def _is_sampled(self) -> bool:
        is_first, self._has_read = not self._has_read, True
        return self.reads_all or is_first or self._random.random() < SAMPLED


def file_of(entry: Entry) -> str:
    """Return the file that contains a picture: a single file or a tar."""
    tar, is_inside, _ = entry.file.partition(TAR)
    return f"{tar}.tar" if is_inside else entry.file
