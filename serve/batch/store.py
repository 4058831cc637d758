"""Stores a job's files: in a folder, or in any place that fsspec knows, such as an object store.

A file appears whole or not at all. A ledger grows by lines: in a folder it is one file, synced
after each line; an object store cannot append, so there a ledger consists of numbered parts.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from sdxl.files import OutputError, prepare_folder, write_atomic
from sdxl.params import InvalidParams

SCRATCH = "tmp"
"""Folder of unfinished files."""
PART_LINES, PART_S = 16, 5.0
"""A part is written when it has this many lines, or when its first line is this old."""


def token() -> str:
    return secrets.token_hex(4)


@contextmanager
def writing(place: Path | str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(place, error) from error


# -- a folder -------------------------------------------------------------------------------


class FolderStore:
    """Raises OutputError if the place cannot be written, FileNotFoundError if a file is missing."""

    def __init__(self, root: Path, run: str) -> None:
        self.root, self.scratch = root, root / SCRATCH / run

    def prepare(self, *folders: str) -> None:
        """Check that the place is writable, and remove unfinished files of a killed run."""
        prepare_folder(self.root)
        for name in self.names(SCRATCH):
            shutil.rmtree(self.root / SCRATCH / name, ignore_errors=True)
        self.join(*folders)

    def join(self, *folders: str) -> None:
        """Prepare a place that other processes use, without removing files."""
        for folder in (self.scratch, *(self.root / name for name in folders)):
            prepare_folder(folder)

    def remove_all(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def tidy(self) -> None:
        shutil.rmtree(self.root / SCRATCH, ignore_errors=True)

    def sweep(self, before: float) -> None:
        """Remove unfinished files of other processes from before this Unix time."""
        # Only files: a running process needs its folder, even an old one.
        for path in (self.root / SCRATCH).glob("*/*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()

    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        with writing(path):
            # Never recreate the root or its folders: a removed job must not reappear.
            if path.parent.parent != self.root and path.parent != self.root:
                path.parent.mkdir(exist_ok=True)
        write_atomic(path, data, self.scratch)

    def put_file(self, name: str, path: Path) -> None:
        unfinished = self.scratch / path.name
        with writing(self.root / name):
            shutil.copyfile(path, unfinished)
            os.replace(unfinished, self.root / name)

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def remove(self, name: str) -> None:
        """Remove a file; ignore a missing one, which another process may have removed."""
        path = self.root / name
        with writing(path):
            path.unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        """List files and folders; a missing folder is empty."""
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
            return []

    def sizes(self, place: str) -> dict[str, int]:
        """Return the bytes of the files in a folder, or of a single file, by full name."""
        path, sizes = self.root / place, dict[str, int]()
        try:
            files = [path] if path.is_file() else list(path.iterdir())
        except OSError:
            return {}
        for file in files:
            # A file may be removed meanwhile.
            with suppress(OSError):
                if stat.S_ISREG((status := file.stat()).st_mode):
                    sizes[str(file.relative_to(self.root))] = status.st_size
        return sizes

    def ledger(self, shard: str) -> bytes:
        """Return all lines of a shard's ledger, oldest first."""
        try:
            return self.get(f"ledger/{shard}.jsonl")
        except FileNotFoundError:
            return b""

    def ledgers(self) -> list[str]:
        """Return the shards that have a ledger, in order."""
        return [name.removesuffix(".jsonl") for name in self.names("ledger")]

    def append(self, shard: str) -> FileAppender:
        """Return a writer of a ledger, for any thread. Several may write to the same ledger."""
        return FileAppender(self.root / "ledger" / f"{shard}.jsonl")


class FileAppender:
    """Appends to a file. `add` returns after the line is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        with writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    def add(self, line: bytes) -> None:
        with self._lock, writing(self.path):
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                # A crash cut the last line off; keep it, and start a new line.
                line = b"\n" + line
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
            if not os.fstat(self._file).st_nlink:
                raise FileNotFoundError(2, "the ledger was removed")

    def close(self) -> None:
        with self._lock, suppress(OSError):
            # The system reuses the number: a late `add` must not write into another file.
            file, self._file = self._file, -1
            os.close(file)


# -- an object store ------------------------------------------------------------------------


class ObjectStore:
    """A FolderStore's methods. Each file is one atomic PUT. After a crash, pictures that are not in
    the ledger are made again, with the same bytes and names."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __reduce__(self) -> Any:
        """Pickle without connections, which stay in their process."""
        return ObjectStore, (self.url,)

    @cached_property
    def files(self) -> Any:
        """The file system of fsspec, below the URL."""
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem

        try:
            files, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise InvalidParams("out", self.url, f"needs its fsspec package: {error}") from error
        return DirFileSystem(root, files)

    def prepare(self, *folders: str) -> None:
        """Check that the place is writable: it has no folders and no unfinished files."""
        probe = f"tmp/{token()}"
        self.put(probe, b"")
        self.remove(probe)

    join = prepare

    def remove_all(self) -> None:
        with suppress(FileNotFoundError):
            self.files.rm("", recursive=True)

    def tidy(self) -> None:
        pass

    def sweep(self, before: float) -> None:
        pass

    def put(self, name: str, data: bytes) -> None:
        with self._writing(name) as files:
            files.pipe_file(name, data)

    def create(self, name: str, data: bytes) -> None:
        """Write an object unless it exists. The caller must read which writer won."""
        try:
            self.files.pipe_file(name, data, mode="create")
        except FileExistsError:
            pass
        except Exception:
            # The store cannot create conditionally, or raises another error if the object exists.
            folder, _, file = name.rpartition("/")
            if file not in self.names(folder):
                self.put(name, data)

    def put_file(self, name: str, path: Path) -> None:
        with self._writing(name) as files:
            files.put_file(str(path), name)

    def get(self, name: str) -> bytes:
        data: bytes = self.files.cat_file(name)
        return data

    def remove(self, name: str) -> None:
        # S3 ignores a missing object; other stores raise.
        with suppress(FileNotFoundError):
            self.files.rm_file(name)

    def names(self, folder: str) -> list[str]:
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in self._list(folder))

    def sizes(self, place: str) -> dict[str, int]:
        objects = self._list(place)
        return {each["name"]: each["size"] for each in objects if each["type"] == "file"}

    def ledger(self, shard: str) -> bytes:
        parts = self.names(f"ledger/{shard}")
        return b"".join(self.get(f"ledger/{shard}/{part}") for part in parts)

    def ledgers(self) -> list[str]:
        return self.names("ledger")

    def append(self, shard: str) -> PartAppender:
        parts = self.names(f"ledger/{shard}")
        first = int(parts[-1].partition("-")[0]) + 1 if parts else 0
        return PartAppender(self, shard, first)

    def _list(self, place: str) -> list[dict[str, Any]]:
        try:
            objects: list[dict[str, Any]] = self.files.ls(place, detail=True, refresh=True)
        except FileNotFoundError:
            return []
        return objects

    @contextmanager
    def _writing(self, name: str) -> Iterator[Any]:
        files = self.files
        try:
            yield files
        except Exception as error:
            cause = OSError(f"{type(error).__name__}: {error}")
            raise OutputError(f"{self.url}/{name}", cause) from error


class PartAppender:
    """Writes a ledger as parts, numbered after the existing ones; a token in the name separates two
    writers. Lines of a failed late write go into the next part."""

    def __init__(self, store: ObjectStore, shard: str, first: int) -> None:
        self.store, self.shard, self.number = store, shard, first
        self._token = token()
        self._lines: list[bytes] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def add(self, line: bytes) -> None:
        with self._lock:
            if self._is_closed:
                # After `close` the lines have been counted.
                place = f"{self.store.url}/ledger/{self.shard}"
                raise OutputError(place, OSError("ValueError: the ledger was closed"))
            self._lines.append(line)
            if len(self._lines) >= PART_LINES:
                self._write()
            elif self._timer is None:
                self._timer = threading.Timer(PART_S, self._write_late)
                self._timer.daemon = True
                self._timer.start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._write()

    def _write_late(self) -> None:
        with self._lock, suppress(OutputError):
            self._write()

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            name = f"ledger/{self.shard}/{self.number:06d}-{self._token}.jsonl"
            self.store.put(name, b"".join(self._lines))
            self.number, self._lines = self.number + 1, []


Store = FolderStore | ObjectStore


def open_store(place: str, run: str) -> Store:
    """Open a folder or a URL. Each `run` has its own folder of unfinished files."""
    return ObjectStore(place) if "://" in place else FolderStore(Path(place).absolute(), run)
