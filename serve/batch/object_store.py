"""A job's files in an object store, by fsspec: an atomic PUT each, a ledger of immutable parts.

A part holds the lines of a few pictures. What a crash keeps out of the ledger is made again, and
then is the same bytes under the same name.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdxl.files import OutputError
from sdxl.params import InvalidParams
from serve.batch.store import Appender, token

PART_LINES, PART_S = 16, 5.0
"""A part is written when it holds so many lines, or when its first line is so old."""


class ObjectStore:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opened: tuple[Any, str] | None = None

    def __reduce__(self) -> Any:
        """Connections stay in the process that made them."""
        return ObjectStore, (self.url,)

    def prepare(self, *folders: str) -> None:
        """It has no folders, and nothing is ever unfinished there."""
        probe = f"tmp/{token()}"
        self.put(probe, b"")
        self.remove(probe)

    def join(self, *folders: str) -> None:
        self.prepare()

    def remove_all(self) -> None:
        files, root = self._open()
        with suppress(FileNotFoundError):
            files.rm(root, recursive=True)

    def tidy(self) -> None:
        pass

    def sweep(self, before: float) -> None:
        pass

    def put(self, name: str, data: bytes) -> None:
        files, root = self._open()
        try:
            files.pipe_file(f"{root}/{name}", data)
        except Exception as error:
            raise self._error(name, error) from error

    def create(self, name: str, data: bytes) -> None:
        """Only where there is none yet, where the store can tell; reading it says whose it is."""
        files, root = self._open()
        try:
            files.pipe_file(f"{root}/{name}", data, mode="create")
        except FileExistsError:
            pass
        except Exception:
            # Most stores that know no such request refuse it; others have no one error for it.
            folder, _, own = name.rpartition("/")
            if own not in self.names(folder):
                self.put(name, data)

    def put_file(self, name: str, path: Path) -> None:
        files, root = self._open()
        try:
            files.put_file(str(path), f"{root}/{name}")
        except Exception as error:
            raise self._error(name, error) from error

    def get(self, name: str) -> bytes:
        files, root = self._open()
        found: bytes = files.cat_file(f"{root}/{name}")
        return found

    def remove(self, name: str) -> None:
        files, root = self._open()
        # S3 does not mind; other stores do.
        with suppress(FileNotFoundError):
            files.rm_file(f"{root}/{name}")

    def names(self, folder: str) -> list[str]:
        files, root = self._open()
        try:
            found = files.ls(f"{root}/{folder}", detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def sizes(self, place: str) -> dict[str, int]:
        files, root = self._open()
        try:
            found = files.ls(f"{root}/{place}", detail=True, refresh=True)
        except FileNotFoundError:
            return {}
        start = len(root) + 1
        return {each["name"][start:]: each["size"] for each in found if each["type"] == "file"}

    def ledger(self, shard: str) -> bytes:
        parts = self.names(f"ledger/{shard}")
        return b"".join(self.get(f"ledger/{shard}/{part}") for part in parts)

    def ledgers(self) -> list[str]:
        return self.names("ledger")

    def append(self, shard: str) -> Appender:
        parts = self.names(f"ledger/{shard}")
        first = int(parts[-1].partition("-")[0]) + 1 if parts else 0
        return PartAppender(self, shard, first)

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            import fsspec

            try:
                self._opened = fsspec.core.url_to_fs(self.url)
            except (ImportError, ValueError) as error:
                raise InvalidParams(
                    "out", self.url, f"needed its fsspec package: {error}"
                ) from error
        return self._opened

    def _error(self, name: str, error: Exception) -> OutputError:
        cause = OSError(f"{type(error).__name__}: {error}")
        return OutputError(f"{self.url}/{name}", cause)


class PartAppender:
    """Numbers go on from the parts that are there; the token keeps two writers apart. Lines that
    a late write could not put are kept for the next."""

    def __init__(self, store: ObjectStore, shard: str, first: int) -> None:
        self.store, self.shard, self.number = store, shard, first
        self._token = token()
        self._lines: list[bytes] = []
        self._lock = threading.Lock()
        self._late: threading.Timer | None = None
        self._is_closed = False

    def add(self, line: bytes) -> None:
        with self._lock:
            if self._is_closed:
                # Whoever closed it counts what is there.
                error = ValueError("the ledger was closed")
                raise self.store._error(f"ledger/{self.shard}", error)
            self._lines.append(line)
            if len(self._lines) >= PART_LINES:
                self._write()
            elif self._late is None:
                self._late = threading.Timer(PART_S, self._write_late)
                self._late.daemon = True
                self._late.start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._write()

    def _write_late(self) -> None:
        with self._lock, suppress(OutputError):
            self._write()

    def _write(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self._lines:
            name = f"ledger/{self.shard}/{self.number:06d}-{self._token}.jsonl"
            self.store.put(name, b"".join(self._lines))
            self.number, self._lines = self.number + 1, []
