"""Where a job's files lie: a folder, or any place that fsspec knows (an object store, say).

A file appears whole or not at all. A ledger grows by lines: in a folder it is one file that each
line is flushed to; an object store cannot append, so there it is numbered parts that never change.
It does not know what the files are.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from sdxl.files import OutputError, prepare_folder, write_atomic

SCRATCH = "tmp"
"""Unfinished files. Never below images/, which holds pictures and nothing else."""


class Appender(Protocol):
    """One writer's end of a ledger. Several may write the same one."""

    def add(self, line: bytes) -> None: ...
    def close(self) -> None:
        """Everything added is safe when this returns."""
        ...


class Store(Protocol):
    """Raises OutputError where a place cannot be written, FileNotFoundError where nothing is."""

    def prepare(self, *folders: str) -> None:
        """Prove that it takes files, and remove what a killed run left unfinished."""
        ...

    def join(self, *folders: str) -> None:
        """As `prepare`, beside others who are at work here: it removes nothing."""
        ...

    def remove_all(self) -> None:
        """Everything, and the place itself."""
        ...

    def tidy(self) -> None:
        """Nothing unfinished is left: remove where it would lie."""
        ...

    def sweep(self, before: float) -> None:
        """Remove what others left unfinished then, a time of the Unix clock."""
        ...

    def put(self, name: str, data: bytes) -> None: ...
    def put_file(self, name: str, path: Path) -> None:
        """What lies in a file here, of any length."""
        ...

    def get(self, name: str) -> bytes: ...
    def remove(self, name: str) -> None:
        """One that is not there any more is no error: another may have been quicker."""
        ...

    def names(self, folder: str) -> list[str]:
        """Of the files and folders in it; none where it isn't there."""
        ...

    def sizes(self, place: str) -> dict[str, int]:
        """In bytes: of the files in a folder, or of the one file that it is; by whole name."""
        ...

    def ledger(self, shard: str) -> bytes:
        """All lines of one shard's ledger, the oldest first."""
        ...

    def ledgers(self) -> list[str]:
        """The shards that have one, in order."""
        ...

    def append(self, shard: str) -> Appender: ...


class FolderStore:
    def __init__(self, root: Path, run: str) -> None:
        self.root, self.scratch = root, root / SCRATCH / run

    def prepare(self, *folders: str) -> None:
        prepare_folder(self.root)
        for name in self.names(SCRATCH):
            shutil.rmtree(self.root / SCRATCH / name, ignore_errors=True)
        self.join(*folders)

    def join(self, *folders: str) -> None:
        for folder in (self.scratch, *(self.root / name for name in folders)):
            prepare_folder(folder)

    def remove_all(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def tidy(self) -> None:
        shutil.rmtree(self.root / SCRATCH, ignore_errors=True)

    def sweep(self, before: float) -> None:
        # Not the folders: whoever lives needs theirs, however old.
        for path in (self.root / SCRATCH).glob("*/*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()

    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        try:
            # Not the root, nor its folders: what has gone must not be made again, half empty.
            if path.parent.parent != self.root and path.parent != self.root:
                path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(path, error) from error
        write_atomic(path, data, self.scratch)

    def put_file(self, name: str, path: Path) -> None:
        unfinished = self.scratch / path.name
        try:
            shutil.copyfile(path, unfinished)
            os.replace(unfinished, self.root / name)
        except OSError as error:
            raise OutputError(self.root / name, error) from error

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def remove(self, name: str) -> None:
        path = self.root / name
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(path, error) from error

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
            return []

    def sizes(self, place: str) -> dict[str, int]:
        path = self.root / place
        try:
            files = [path] if path.is_file() else list(path.iterdir())
        except OSError:
            return {}
        return {str(file.relative_to(self.root)): size for file, size in file_sizes(files)}

    def ledger(self, shard: str) -> bytes:
        try:
            return self.get(f"ledger/{shard}.jsonl")
        except FileNotFoundError:
            return b""

    def ledgers(self) -> list[str]:
        return [name.removesuffix(".jsonl") for name in self.names("ledger")]

    def append(self, shard: str) -> Appender:
        return FileAppender(self.root / "ledger" / f"{shard}.jsonl")


class FileAppender:
    """Every line is on the disk when `add` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise OutputError(path, error) from error

    def add(self, line: bytes) -> None:
        try:
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                # A crash tore the last line. It stays, and this one begins anew.
                line = b"\n" + line
            while line:
                line = line[os.write(self._file, line) :]
            os.fsync(self._file)
            if not os.fstat(self._file).st_nlink:
                raise FileNotFoundError(2, "the ledger was removed")
        except OSError as error:
            raise OutputError(self.path, error) from error

    def close(self) -> None:
        # The system gives the number to the next file: who adds late must not write into that one.
        file, self._file = self._file, -1
        with suppress(OSError):
            os.close(file)


def file_sizes(files: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    for file in files:
        # It may go meanwhile, or never have been a file.
        with suppress(OSError):
            if stat.S_ISREG((found := file.stat()).st_mode):
                yield file, found.st_size


def token() -> str:
    return secrets.token_hex(4)
