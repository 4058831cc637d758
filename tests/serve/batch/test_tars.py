"""Tars are made and read with as many threads as a distant store can serve, and read once."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from pathlib import Path

from sdxl.handover import in_threads
from serve.batch import ledger
from serve.batch.ledger import Entry
from serve.batch.store import FolderStore
from serve.batch.tars import LOOSE, pack, reader

SHARD = "000000"


class DistantStore(FolderStore):
    """Every answer takes a while; it notes what was asked, and how many at a time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "run")
        self.asked, self.most = Counter[str](), Counter[str]()
        self._open, self._lock = Counter[str](), threading.Lock()
        self.prepare("images", "ledger", LOOSE)

    def get(self, name: str) -> bytes:
        self._wait("get", name)
        return super().get(name)

    def remove(self, name: str) -> None:
        self._wait("remove", name)
        super().remove(name)

    def _wait(self, what: str, name: str) -> None:
        with self._lock:
            self.asked[name] += 1
            self._open[what] += 1
            self.most[what] = max(self.most[what], self._open[what])
        time.sleep(0.01)
        with self._lock:
            self._open[what] -= 1


def test_a_tar_is_made_by_many_threads_and_read_by_one(tmp_path: Path) -> None:
    store = DistantStore(tmp_path)
    book = store.append(SHARD)
    for i in range(24):
        data, file = f"picture {i}".encode(), f"{LOOSE}/{SHARD}/{i}.png"
        store.put(file, data)
        digest, params = hashlib.sha256(data).hexdigest(), {"prompt": "a"}
        entry = Entry(i, str(i), f"line {i}", "run", file, digest, len(data), params=params)
        book.add(entry.as_line())
    book.close()
    pack(store, 0, "run")
    assert store.names(f"{LOOSE}/{SHARD}") == []
    assert store.most["get"] > 1 and store.most["remove"] > 1
    packed = ledger.in_order(ledger.read(store, SHARD).values())
    read = in_threads(reader(store), [entry.file for entry in packed], 8)
    assert list(read) == [f"picture {i}".encode() for i in range(24)]
    assert store.asked[f"images/{SHARD}.tar"] == 1
