"""The LoRAs, embeddings, ControlNets and image adapters that requests may name: safetensors files
in folders.

The folders are scanned for every list and for unknown names, so that files can be added and removed
without a restart. A request gives a file's listed name, never a path. This module knows no tensors.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

from sdxl.attachments import unknown_name
from sdxl.digests import Stamp, remembered_digest, sha256_of, stamps
from sdxl.parameter import MAX_NAME, NAME
from sdxl.prompt import BODY, embedding_words, words_of
from sdxl.single_file.recognition import SAFETENSORS

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
"""prefix of the keys in PEFT's file"""
LEARNED_FILE, LEARNED_FILE_2 = "learned_embeds.safetensors", "learned_embeds_2.safetensors"
"""files of diffusers' embeddings for SDXL, one for each text encoder"""
CONTROL_FILE, CONTROL_CONFIG = "diffusion_pytorch_model.safetensors", "config.json"
"""files of diffusers' ControlNets"""
UNION_KEY = "task_embedding"
"""A union's file has a tensor whose key ends so, with a row for each type of map."""
NAMED_BY_FOLDER = (DIFFUSERS_FILE, PEFT_FILE, LEARNED_FILE, CONTROL_FILE)
COMPANIONS = {
    PEFT_FILE: PEFT_CONFIG,
    LEARNED_FILE: LEARNED_FILE_2,
    CONTROL_FILE: CONTROL_CONFIG,
}
"""second files, beside the first"""
SETTLED_NS = 10**9
"""a folder that changed longer ago has another time after its next change"""
EMBEDDINGS = "embeddings"
"""the subfolder of embeddings"""
ENCODER = "image_encoder"
"""a subfolder with the encoder of image adapters"""
Kind = Literal["lora", "embedding", "control", "image"]
FILE_KEYS: Mapping[Kind, str] = {
    "lora": "lora_files",
    "embedding": "embedding_files",
    "control": "control_files",
    "image": "image_prompt_files",
}
"""metadata keys of a picture for the digests of files, by name"""
FIELDS: Mapping[Kind, str] = {
    "lora": "loras",
    "embedding": "prompt",
    "control": "controls",
    "image": "image_prompts",
}
"""fields of a request that name them"""
LABELS: Mapping[Kind, str] = {
    "lora": "LoRAs",
    "embedding": "embeddings",
    "control": "ControlNets",
    "image": "IP-Adapters",
}
"""names of the kinds in messages"""
HASHED_KINDS: tuple[Kind, ...] = ("control", "image")
HASHED = slice(0x100000, 0x110000)
"""the bytes that stable-diffusion-webui hashes of the files of HASHED_KINDS"""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterFile:
    """A file at the time of the scan."""

    name: str
    path: Path
    kind: Kind
    bytes: int
    stamps: tuple[Stamp, ...]
    """change with the content"""

    @property
    def sha256(self) -> str:
        """The file's digest; with a companion, the digest of both digests."""
        return _digest(self.path, self.stamps)

    @property
    def is_unchanged(self) -> bool:
        try:
            return tuple(stamps(files_of(self.path))) == self.stamps
        except OSError:
            return False

    @property
    def digests(self) -> dict[str, str]:
        """The sha256, and stable-diffusion-webui's short hash: webui_hash, or 12 digits of a LoRA's
        AddNet hash (the sha256 without the header) or of an embedding's sha256."""
        if self.kind in HASHED_KINDS:
            return {"sha256": self.sha256, "short": self.webui_hash}
        is_lora = self.kind == "lora"
        short = _tensors_digest(self.path, self.stamps) if is_lora else self.sha256
        return {"sha256": self.sha256, "short": short[:12]}

    @property
    def webui_hash(self) -> str:
        """The hash of a ControlNet or image adapter in stable-diffusion-webui's `name [hash]`."""
        return _part_digest(self.path, self.stamps)[:8]

    @property
    def vectors(self) -> int:
        """The number of an embedding's vectors; 1 if the file is broken, which loading reports."""
        shapes = _shapes(self.path, self.stamps).values()
        counts = [shape[0] if len(shape) > 1 else 1 for shape in shapes]
        return min(max(counts, default=1), BODY)

    @property
    def types(self) -> int:
        """The number of map types of a union; 0 for other files and for broken ones."""
        shapes = _shapes(self.path, self.stamps)
        return next((s[0] for name, s in shapes.items() if name.endswith(UNION_KEY) and s), 0)


@lru_cache(maxsize=4096)
def _tensors_digest(path: Path, stamps: tuple[Stamp, ...]) -> str:
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=4096)
def _part_digest(path: Path, stamps: tuple[Stamp, ...]) -> str:
    with path.open("rb") as file:
        file.seek(HASHED.start)
        return hashlib.sha256(file.read(HASHED.stop - HASHED.start)).hexdigest()


@lru_cache(maxsize=4096)
def _shapes(path: Path, stamps: tuple[Stamp, ...]) -> Mapping[str, Sequence[int]]:
    """Return the shapes of a file's tensors; none if the file cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return {}


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


@dataclass
class Catalogue:
    """The files in folders. Of files with equal names, the one in the first folder is listed."""

    folders: Sequence[Path] = ()
    """folders of LoRAs and embeddings"""
    control_folders: Sequence[Path] = ()
    """folders of ControlNets"""
    image_folders: Sequence[Path] = ()
    """folders of image adapters"""
    _known: dict[tuple[Kind, str], AdapterFile] = field(
        default_factory=dict, repr=False, compare=False
    )
    """files of earlier scans"""
    _words: dict[str, AdapterFile] = field(default_factory=dict, repr=False, compare=False)
    """the embeddings of the last scan, by the words that name them"""
    _scanned: dict[Path, int] | None = field(default=None, repr=False, compare=False)
    """the folders of the last scan for embeddings, with the times of their changes"""

    def listed(self, kind: Kind) -> list[AdapterFile]:
        """Scan the folders and return the files of a kind, sorted by name."""
        files: dict[str, AdapterFile] = {}
        folders = {"control": self.control_folders, "image": self.image_folders}
        for folder in folders.get(kind, self.folders):
            for each in _scan(folder, kind):
                files.setdefault(each.name, each)
        return [files[name] for name in sorted(files)]

    def names(self) -> tuple[tuple[str, ...], dict[str, int], dict[str, str], dict[str, str]]:
        """Return the names of LoRAs, of embeddings with their number of vectors, and of ControlNets
        and image adapters with stable-diffusion-webui's hashes."""
        loras = tuple(each.name for each in self.listed("lora"))
        vectors = {each.name: each.vectors for each in self.listed("embedding")}
        nets, adapters = (
            {each.name: each.webui_hash for each in self.listed(kind)} for kind in HASHED_KINDS
        )
        return loras, vectors, nets, adapters

    def find(self, kind: Kind, name: str) -> AdapterFile:
        """Return a file by its name, or raise InvalidParams with the most similar names."""
        known = self._known.get((kind, name))
        if known and known.is_unchanged:
            return known
        files = {each.name: each for each in self.listed(kind)}
        self._known |= {(kind, each): file for each, file in files.items()}
        if name in files:
            return files[name]
        raise unknown_name(FIELDS[kind], name, files, LABELS[kind])

    def embeddings_in(self, texts: Mapping[str, str]) -> list[AdapterFile]:
        """Return the embeddings that these texts name; the keys are the texts' fields. Raise
        InvalidParams for an unknown embedding:NAME."""
        for _ in range(2):
            words = self._embeddings_by_word()
            named = set().union(*(embedding_words(text, words, n) for n, text in texts.items()))
            files = sorted({words[word] for word in named}, key=_by_depth)
            if all(each.is_unchanged for each in files):
                break
            self._scanned = None
        return files

    def _embeddings_by_word(self) -> dict[str, AdapterFile]:
        """Return the embeddings by the words that name them. Scan only if a folder has changed."""
        if self._scanned is None or _changes(self._scanned) != self._scanned:
            tops = [folder / EMBEDDINGS for folder in self.folders]
            inside = (place for top in tops for place, _ in _walk(top))
            scanned = _changes({*tops, *inside})
            files = sorted(self.listed("embedding"), key=_by_depth, reverse=True)
            self._words = {word: each for each in files for word in words_of(each.name)}
            # A later change may have the same time as a very recent one.
            is_settled = time.time_ns() - max(scanned.values(), default=0) > SETTLED_NS
            self._scanned = scanned if is_settled else None
        return self._words


def _changes(folders: Iterable[Path]) -> dict[Path, int]:
    """Return the time of each folder's last change; 0 if the folder does not exist."""
    return {path: _changed_ns(path) for path in folders}


def _changed_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _scan(folder: Path, kind: Kind) -> Iterator[AdapterFile]:
    top = folder / EMBEDDINGS if kind == "embedding" else folder
    for path in _files(top, skipped=EMBEDDINGS if kind == "lora" else ""):
        if kind == "image" and path.parent.name == ENCODER:
            continue
        is_named_by_folder = path.name in NAMED_BY_FOLDER and path.parent != top
        named = path.parent if is_named_by_folder else path.with_suffix("")
        name = named.relative_to(top).as_posix()
        if path.name == LEARNED_FILE_2:
            continue
        if len(name) > MAX_NAME or not NAME.fullmatch(name):
            _warn_of_name(str(path))
            continue
        try:
            stamp = tuple(stamps(files_of(path)))
            yield AdapterFile(name, path, kind, path.stat().st_size, stamp)
        except OSError:
            # The file was removed meanwhile, or is a dangling link.
            continue


@lru_cache(maxsize=4096)
def _warn_of_name(path: str) -> None:
    """Log once that a file is not listed."""
    needed = f"at most {MAX_NAME} characters without : , < >"
    log.warning("%r is not listed; rename it: names have %s", path, needed)


def _by_depth(file: AdapterFile) -> tuple[int, str]:
    return file.name.count("/"), file.name


def _files(top: Path, skipped: str) -> Iterator[Path]:
    """Yield the safetensors files below a folder, without those in its subfolder `skipped`."""
    for place, files in _walk(top, skipped):
        for name in sorted(files):
            if name[0] != "." and name.lower().endswith(SAFETENSORS):
                yield place / name


def _walk(top: Path, skipped: str = "") -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder with its files."""
    for place, folders, files in os.walk(top, followlinks=True):
        here = Path(place)
        folders[:] = [
            name
            for name in sorted(folders)
            if name[0] != "."
            and not (name == skipped and here == top)
            # A link to a parent folder would be followed without end.
            and not here.resolve().is_relative_to((here / name).resolve())
        ]
        yield here, files
