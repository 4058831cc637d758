"""Packs pictures into WebDataset's tar files, one for each shard: `<key>.png` and `<key>.json`.

Pictures of an incomplete shard lie below loose/. The complete shard is written as one tar, the
ledger then names the tar, and the single files are removed. Equal pictures give an equal tar.
"""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePosixPath
from queue import SimpleQueue

from sdxl.handover import in_threads
from serve.batch import ledger
from serve.batch.ledger import Entry
from serve.batch.rows import bounded, shard_name
from serve.batch.store import Store

LOOSE = "loose"
TAR = ".tar/"
"""In the ledger it separates the names of a tar and its member."""
THREADS = 8
"""Many, since a distant store answers slowly."""


class Packer:
    """Packs complete shards on a thread, one after another, while the driver continues.

    After a crash the next run packs the shards again.
    """

    def __init__(self, pack: Callable[[int], None]) -> None:
        self._pack = pack
        self._waiting: SimpleQueue[int | None] = SimpleQueue()
        self._error: Exception | None = None
        self._added = self._packed = 0
        self._is_left = False
        # A daemon, since a store that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="packer", daemon=True)
        self._thread.start()

    def add(self, shard: int) -> None:
        self._added += 1
        self._waiting.put(shard)

    def is_done(self) -> bool:
        """Return whether all added shards are packed; raise the error of a failed one."""
        if self._error is not None:
            raise self._error
        return self._packed == self._added

    def leave(self, timeout_s: float) -> None:
        """Finish the current shard and start no other."""
        self._is_left = True
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (shard := self._waiting.get()) is not None and not self._is_left:
            try:
                self._pack(shard)
            except Exception as error:
                self._error = error
                return
            self._packed += 1


def reader(store: Store) -> Callable[[str], bytes]:
    """Return a function that reads a picture by its name in the ledger."""

    @lru_cache(maxsize=2)
    def members(tar: str) -> dict[str, bytes]:
        return unpack(store.get(tar))

    # Without the lock every thread would fetch the same tar.
    fetching = threading.Lock()

    def read(file: str) -> bytes:
        tar, is_inside, member = file.partition(TAR)
        if not is_inside:
            return store.get(file)
        try:
            with fetching:
                return members(f"{tar}.tar")[member]
        except KeyError:
            raise FileNotFoundError(file) from None

    return read


def unpack(data: bytes) -> dict[str, bytes]:
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            files = ((each.name, tar.extractfile(each)) for each in tar)
            return {name: file.read() for name, file in files if file is not None}
    except tarfile.TarError:
        # All pictures of a damaged tar count as missing.
        return {}


def pack(store: Store, shard: int, run: str) -> None:
    """Pack a shard's pictures into its tar. Safe to repeat after any interruption."""
    name = shard_name(shard)
    known = ledger.in_order(ledger.read(store, name).values())
    pictures = [entry for entry in known if entry.error is None]
    if any(entry.file.startswith(LOOSE) for entry in pictures):
        read = reader(store)
        tar = f"images/{name}.tar"
        data = in_threads(lambda entry: read(entry.file), pictures, THREADS)
        named = zip(map(key_of, pictures), pictures, data, strict=True)
        store.put(tar, tar_of(named))
        appender = store.append(name)
        for entry in pictures:
            file = f"{tar}/{key_of(entry)}{PurePosixPath(entry.file).suffix}"
            appender.add(replace(entry, file=file, run=run).as_line())
        appender.close()
    left = [f"{LOOSE}/{name}/{loose}" for loose in store.names(f"{LOOSE}/{name}")]
    for _ in in_threads(store.remove, left, THREADS):
        pass


def key_of(entry: Entry) -> str:
    """Return a picture's key. Dots are escaped, since WebDataset ends a key at its first dot."""
    stem = PurePosixPath(entry.file).stem.replace(".", "%2E")
    return bounded(stem, entry.id)


def tar_of(pictures: Iterable[tuple[str, Entry, bytes]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for key, entry, data in pictures:
            facts = {"id": entry.id, "sha256": entry.sha256, **entry.params}
            suffix = PurePosixPath(entry.file).suffix
            for name, content in (
                (f"{key}{suffix}", data),
                (f"{key}.json", json.dumps(facts, ensure_ascii=False).encode()),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return file.getvalue()
