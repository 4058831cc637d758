"""Where pictures go: one named file, or names of their own in a folder. It draws nothing."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from sdxl.files import prepare_folder
from sdxl.params import GenerationParams, InvalidParams

FORMATS_BY_SUFFIX = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
SUFFIXES = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
MAX_NAME = 60


@dataclass
class Destination:
    """Proven writable when it is made; no two pictures of a run get the same name."""

    folder: Path
    file_name: str | None
    format: str
    _taken: set[str] = field(default_factory=set)

    @classmethod
    def prepare(cls, out: str, format: str | None, images: int) -> Destination:
        path = Path(out)
        implied = format_of(path)
        if implied is None or path.is_dir():
            destination = cls(path, None, format or "png")
        else:
            if images > 1:
                raise InvalidParams("out", out, f"needed a folder for {images} images")
            if format not in (None, implied):
                raise InvalidParams("format", format, f"{out} needs {implied}")
            destination = cls(path.parent, path.name, implied)
        prepare_folder(destination.folder)
        return destination

    def path(self, params: GenerationParams) -> Path:
        if self.file_name is not None:
            return self.folder / self.file_name
        stem = f"{slug(params.prompt)}-{params.seed}"
        name, copies = stem, 1
        while name in self._taken:
            copies += 1
            name = f"{stem}-{copies}"
        self._taken.add(name)
        return self.folder / (name + SUFFIXES[self.format])


def format_of(path: Path) -> str | None:
    return FORMATS_BY_SUFFIX.get(path.suffix.lower())


def slug(prompt: str) -> str:
    """A prompt as part of a file name that any file system and terminal takes."""
    plain = unicodedata.normalize("NFKD", prompt).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain)[:MAX_NAME].strip("-") or "image"
