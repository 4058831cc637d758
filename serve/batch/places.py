"""The store of a place: a folder, or a bucket of an object store."""

from __future__ import annotations

from pathlib import Path

from serve.batch.store import FolderStore, Store


def open_store(place: str, run: str) -> Store:
    """`run` keeps apart what several starts of one job leave unfinished."""
    if "://" in place:
        # Here and not above: a folder needs nothing of fsspec.
        from serve.batch.object_store import ObjectStore

        return ObjectStore(place)
    return FolderStore(Path(place).absolute(), run)
