"""Destinations of pictures: a file, names in a folder, or standard output."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdxl.files import prepare_folder
from sdxl.params import GenerationParams, InvalidParams

FORMATS_BY_SUFFIX = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
FOREIGN = (".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".jxl", ".svg", ".ico", ".pdf")
"""Suffixes of other formats: such a name is an error, not a folder."""
STDOUT = "-"
JOINERS = "\u200c\u200d"
MAX_NAME, MAX_NAME_BYTES = 60, 180
"""The longest slug: file systems allow names of 255 bytes, with seed, number and suffix."""


@dataclass
class Destination:
    """A writable destination. Each picture gets a name that no other picture has."""

    folder: Path
    file_name: str | None
    format: str
    _taken: set[str] = field(default_factory=set)

    @classmethod
    def prepare(
        cls, out: str, format: str | None, images: int, sheet: Path | None = None
    ) -> Destination:
        """Prepare the destination; `sheet` is another file of the command."""
        path, implied = Path(out), format_of(Path(out))
        is_file = out == STDOUT or (implied is not None and not path.is_dir())
        if is_file and images > 1:
            raise InvalidParams("out", out, f"must be a folder for {images} images")
        if out == STDOUT:
            if sys.stdout.isatty():
                raise InvalidParams("out", out, "must be a file or a pipe, not a terminal")
            return cls(Path(), STDOUT, format or "png")
        if path.suffix.lower() in FOREIGN and not path.is_dir():
            raise InvalidParams("out", out, f"must be a folder, or {', '.join(FORMATS_BY_SUFFIX)}")
        if is_file and format not in (None, implied):
            raise InvalidParams("format", format, f"must be {implied} for {out}")
        if is_file and implied is not None:
            destination = cls(path.parent, path.name, implied)
        else:
            destination = cls(path, None, format or "png")
        prepare_folder(destination.folder)
        if sheet is not None and sheet.parent.resolve() == destination.folder.resolve():
            if sheet.name == destination.file_name:
                raise InvalidParams("sheet", str(sheet), "must be another file than --out")
            destination._taken.add(sheet.name)
        return destination

    @property
    def is_stdout(self) -> bool:
        return self.file_name == STDOUT

    def path(self, params: GenerationParams, metadata: Mapping[str, Any] | None = None) -> Path:
        """Return a picture's path; a file with the same `metadata` may be replaced."""
        if self.file_name is not None:
            return self.folder / self.file_name
        stem, suffix = f"{slug(params.prompt)}-{params.seed}", SUFFIXES[self.format]
        path, copies = self.folder / f"{stem}{suffix}", 1
        while path.name in self._taken or is_another(path, metadata):
            copies += 1
            path = self.folder / f"{stem}-{copies}{suffix}"
        self._taken.add(path.name)
        return path


def is_another(path: Path, metadata: Mapping[str, Any] | None) -> bool:
    """Return whether the path is a file with other metadata."""
    if not path.exists():
        return False
    from sdxl.images import NoParameters, read_parameters, stored_fields

    try:
        return read_parameters(path) != json.loads(json.dumps(stored_fields(metadata or {})))
    except (OSError, NoParameters):
        return True


def format_of(path: Path) -> str | None:
    return FORMATS_BY_SUFFIX.get(path.suffix.lower())


def slug(prompt: str) -> str:
    """Return a prompt as a part of a file name for any file system: its first words, with letters
    and digits of any script."""
    # Not casefold, which replaces some letters: ß by ss.
    plain = unicodedata.normalize("NFKC", prompt).lower()
    words = "".join(each if _is_of_a_word(each) else " " for each in plain).split()
    name = ""
    for word in words:
        longer = f"{name}-{word}" if name else word
        if not _fits(longer):
            break
        name = longer
    return name or _cut(words[0] if words else "") or "image"


def _is_of_a_word(character: str) -> bool:
    """Return whether a character is part of a word: many scripts write vowels as marks, or use
    zero-width joiners."""
    return unicodedata.category(character)[0] in "LNM" or character in JOINERS


def _fits(name: str) -> bool:
    return len(name) <= MAX_NAME and len(name.encode()) <= MAX_NAME_BYTES


def _cut(word: str) -> str:
    while not _fits(word):
        word = word[:-1]
    return word
