"""Pictures in tar files in WebDataset's form, one a shard: `<key>.png` beside `<key>.json`.

Until a shard is whole its pictures lie below loose/. A tar is made from them in one go, named in
the ledger, and only then do they go. The same pictures give the same tar.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import PurePosixPath
from threading import Lock

from sdxl.handover import in_threads
from serve.batch import ledger
from serve.batch.ledger import Entry
from serve.batch.rows import bounded, shard_name
from serve.batch.store import Store

LOOSE = "loose"
TAR = ".tar/"
"""Between a tar's name and its member's, in the ledger."""
THREADS = 8
"""A distant store answers many at a time."""


def reader(store: Store) -> Callable[[str], bytes]:
    """Reads a picture by its name in the ledger; one in a tar by the tar's name and its own."""

    @lru_cache(maxsize=2)
    def members(tar: str) -> dict[str, bytes]:
        return unpack(store.get(tar))

    fetching = Lock()

    def read(file: str) -> bytes:
        tar, is_inside, member = file.partition(TAR)
        if not is_inside:
            return store.get(file)
        try:
            with fetching:
                # Else every thread that reads one at once would fetch all of it.
                inside = members(f"{tar}.tar")
            return inside[member]
        except KeyError:
            raise FileNotFoundError(file) from None

    return read


def unpack(data: bytes) -> dict[str, bytes]:
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            files = ((each.name, tar.extractfile(each)) for each in tar)
            return {name: file.read() for name, file in files if file is not None}
    except tarfile.TarError:
        # Damaged: nothing in it counts.
        return {}


def pack(store: Store, shard: int, run: str) -> None:
    """One shard's pictures into its tar. Doing it again, wherever it broke off, is safe."""
    name = shard_name(shard)
    known = ledger.in_order(ledger.read(store, name).values())
    pictures = [entry for entry in known if entry.error is None]
    if any(entry.file.startswith(LOOSE) for entry in pictures):
        read = reader(store)
        tar = f"images/{name}.tar"
        data = in_threads(lambda entry: read(entry.file), pictures, THREADS)
        named = zip(map(key_of, pictures), pictures, data, strict=True)
        store.put(tar, tar_of(named))
        book = store.append(name)
        for entry in pictures:
            moved = f"{tar}/{key_of(entry)}{PurePosixPath(entry.file).suffix}"
            book.add(Entry(**{**vars(entry), "file": moved, "run": run}).as_line())
        book.close()
    left = [f"{LOOSE}/{name}/{loose}" for loose in store.names(f"{LOOSE}/{name}")]
    for _ in in_threads(store.remove, left, THREADS):
        pass


def key_of(entry: Entry) -> str:
    """A key ends at the first dot there; with three characters for each it may grow too long."""
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
