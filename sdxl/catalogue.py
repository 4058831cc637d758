"""The LoRAs that requests may name, and embeddings: safetensors files in folders.

The folders are read for every list and for names not seen before, so files come and go without a
restart. A request names a file as it is listed, never by a path. This module knows no tensors.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from sdxl.attachments import LORA_FILES, MAX_NAME, NAME, Lora
from sdxl.digests import Stamp, remembered_digest, sha256_of, stamps
from sdxl.parameter import InvalidParams
from sdxl.single_file.recognition import SAFETENSORS

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
"""of the keys in PEFT's file"""
LEARNED_FILE, LEARNED_FILE_2 = "learned_embeds.safetensors", "learned_embeds_2.safetensors"
"""diffusers' embeddings for SDXL: one file for each text encoder"""
NAMED_BY_FOLDER = (DIFFUSERS_FILE, PEFT_FILE, LEARNED_FILE)
COMPANIONS = {PEFT_FILE: PEFT_CONFIG, LEARNED_FILE: LEARNED_FILE_2}
"""second files, which lie beside the first"""
EMBEDDINGS = "embeddings"
"""the subfolder of embeddings"""
Kind = Literal["lora", "embedding"]


@dataclass(frozen=True)
class AdapterFile:
    """A file as it was when it was listed."""

    name: str
    path: Path
    kind: Kind
    bytes: int
    stamps: tuple[Stamp, ...]
    """change with the content"""

    @property
    def sha256(self) -> str:
        """The file's digest; with a companion, that of both digests."""
        return _digest(self.path, self.stamps)

    @property
    def is_unchanged(self) -> bool:
        try:
            return tuple(stamps(files_of(self.path))) == self.stamps
        except OSError:
            return False

    @property
    def short_hash(self) -> str:
        """The 12 digits by which stable-diffusion-webui and sites know a LoRA: of the sha256 of
        all that follows the header (its AddNet hash)."""
        return _tensors_digest(self.path, self.stamps)[:12]


@lru_cache(maxsize=4096)
def _tensors_digest(path: Path, stamps: tuple[Stamp, ...]) -> str:
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=4096)
def _digest(path: Path, stamps: tuple[Stamp, ...]) -> str:
    paths = files_of(path)

    def compute() -> str:
        digests = [sha256_of(each) for each in paths]
        return (
            digests[0] if len(digests) == 1 else hashlib.sha256(repr(digests).encode()).hexdigest()
        )

    return remembered_digest(paths, compute)


def files_of(path: Path) -> list[Path]:
    """Return the file, and its companion if it has one."""
    companion = path.with_name(COMPANIONS.get(path.name, path.name))
    return [path, companion] if companion != path and companion.is_file() else [path]


@dataclass(frozen=True)
class Catalogue:
    """Of several files with one name, it lists the one of the first folder."""

    folders: Sequence[Path] = ()
    _found: dict[str, AdapterFile] = field(default_factory=dict, repr=False, compare=False)
    """the LoRAs of the last scan, which a look-up need not repeat"""

    def loras(self) -> list[AdapterFile]:
        files = self._listed("lora")
        self._found.clear()
        self._found.update((each.name, each) for each in files)
        return files

    def embeddings(self) -> list[AdapterFile]:
        return self._listed("embedding")

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the LoRAs and of the embeddings."""
        lists = self.loras(), self.embeddings()
        loras, embeddings = (tuple(each.name for each in files) for files in lists)
        return loras, embeddings

    def lora(self, name: str, field: str = "loras") -> AdapterFile:
        """Find a LoRA, or raise InvalidParams with the nearest names."""
        known = self._found.get(name)
        if known and known.is_unchanged:
            return known
        files = {each.name: each for each in self.loras()}
        if name in files:
            return files[name]
        near = difflib.get_close_matches(name[:MAX_NAME], files, n=3, cutoff=0)
        needed = f"such as {', '.join(near)}" if near else "but the model has none"
        raise InvalidParams(field, name, f"must name LoRAs of the model, {needed}")

    def embedding(self, name: str) -> AdapterFile | None:
        return next((each for each in self.embeddings() if each.name == name), None)

    def _listed(self, kind: Kind) -> list[AdapterFile]:
        files: dict[str, AdapterFile] = {}
        for folder in self.folders:
            for each in _scan(folder, kind):
                files.setdefault(each.name, each)
        return [files[name] for name in sorted(files)]


def describe_files(loras: Sequence[Lora] | None, catalogue: Catalogue) -> dict[str, Any]:
    """What a picture's metadata says of its LoRAs' files."""
    files = [catalogue.lora(each.name) for each in loras or ()]
    facts = {file.name: {"sha256": file.sha256, "short": file.short_hash} for file in files}
    return {LORA_FILES: facts} if facts else {}


def _scan(folder: Path, kind: Kind) -> Iterator[AdapterFile]:
    top = folder / EMBEDDINGS if kind == "embedding" else folder
    for path in _walk(top, skipped="" if kind == "embedding" else EMBEDDINGS):
        is_named_by_folder = path.name in NAMED_BY_FOLDER and path.parent != top
        named = path.parent if is_named_by_folder else path.with_suffix("")
        name = named.relative_to(top).as_posix()
        if path.name == LEARNED_FILE_2 or len(name) > MAX_NAME or not NAME.fullmatch(name):
            continue
        try:
            stamp = tuple(stamps(files_of(path)))
            yield AdapterFile(name, path, kind, path.stat().st_size, stamp)
        except OSError:
            # It was removed since, or is a link to nothing.
            continue


def _walk(top: Path, skipped: str) -> Iterator[Path]:
    """Yield the safetensors files below a folder; `skipped` is a subfolder of it."""
    for place, folders, files in os.walk(top, followlinks=True):
        here = Path(place)
        folders[:] = [
            name
            for name in sorted(folders)
            if name[0] != "."
            and not (name == skipped and here == top)
            # A link to a folder above would be followed without end.
            and not here.resolve().is_relative_to((here / name).resolve())
        ]
        for name in sorted(files):
            if name[0] != "." and name.lower().endswith(SAFETENSORS):
                yield here / name
