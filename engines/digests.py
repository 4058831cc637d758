"""sha256 of files, remembered by size and time of change so that a restart reads no weights again.

It does not know what the files are. Whoever is about to run what a file holds hashes the very
bytes he hands over, and does not come here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from engines.places import home
from sdxl.checkpoint import NETWORK_FOLDERS, Checkpoint
from sdxl.files import OutputError, prepare_folder, write_atomic

RECORD = ".verified.json"

Stamp = tuple[int, int, str]
"""bytes, st_mtime_ns, sha256"""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_digest(checkpoint: Checkpoint) -> str:
    """`Checkpoint.digest`, computed once: gigabytes of weights need not be read at every start."""
    stamp = hashlib.sha256()
    for part in NETWORK_FOLDERS:
        config = checkpoint.folder / part / "config.json"
        for path in (config, *checkpoint.weight_files(part)):
            status = path.stat()
            stamp.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    remembered = home() / "digests" / stamp.hexdigest()
    try:
        return remembered.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        digest = checkpoint.digest
    try:
        prepare_folder(remembered.parent)
        write_atomic(remembered, digest.encode())
    except OutputError:
        # Nowhere to remember it: the next start takes as long as this one.
        pass
    return digest


class Digests:
    """The digests of one folder's files, kept in a file among them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamps = _read(folder / RECORD)

    def of(self, name: str, *, is_fresh: bool = False) -> str:
        """The digest of the file so named; read again where it changed, or where `is_fresh`."""
        path = self.folder / name
        status = path.stat()
        known = self._stamps.get(name)
        if known and not is_fresh and known[:2] == (status.st_size, status.st_mtime_ns):
            return known[2]
        digest = sha256_of(path)
        self._stamps[name] = (status.st_size, status.st_mtime_ns, digest)
        self._write()
        return digest

    def _write(self) -> None:
        try:
            write_atomic(self.folder / RECORD, json.dumps(self._stamps).encode())
        except OutputError:
            # A folder that cannot be written is hashed at every start: slower, and as safe.
            return


def _read(path: Path) -> dict[str, Stamp]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): (int(s), int(t), str(d)) for name, (s, t, d) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        # Not there, or not ours: everything is hashed anew.
        return {}
