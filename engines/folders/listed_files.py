"""Files that a listing beside them names: each inside the folder, there, and as it was written.

It does not know what the listing is or what the files hold; the caller's error says that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdxl.specs import brief

MAX_NAME = 255
"""bytes"""


@dataclass(frozen=True)
class Listing:
    """A listing's path, the error to raise, and what would put things right."""

    path: Path
    error: type[RuntimeError]
    remedy: str

    def described(self, format: int, command: str) -> dict[str, Any]:
        """What the listing says but for its format, which is the one needed."""
        try:
            value: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            said = f"no {self.path.name} there; needed a folder of `{command}`"
            raise self.error(f"{self.path.parent}: {said}") from None
        if (found := value.pop("format")) != format:
            raise self.error(f"{self.path}: has format {found!r}, needed {format}; {self.remedy}")
        return value

    def file(self, name: str) -> Path:
        """The path of a file that the listing names."""
        folder = self.path.parent
        path = folder / name
        if not _is_plain(name) or path.resolve().parent != folder.resolve():
            raise self.error(f"{self.path}: {brief(name)} leaves the folder; needed a plain name")
        if not path.is_file():
            raise self.error(f"{path}: not there; needed by {self.path.name}, {self.remedy}")
        return path

    def check_size(self, path: Path, found: int, needed: int) -> None:
        if found != needed:
            raise self.error(f"{path}: has {found} bytes, needed {needed}; {self.remedy}")

    def check_digest(self, path: Path, found: str, needed: str) -> None:
        if found != needed:
            raise self.error(
                f"{path}: has sha256 {found[:12]}…, needed {needed[:12]}… of {self.path.name}; "
                f"{self.remedy}"
            )


def _is_plain(name: str) -> bool:
    """As file systems take it: no folder, no NUL, not too long, valid Unicode."""
    is_one = Path(name).name == name and "\0" not in name
    return is_one and len(name.encode(errors="replace")) <= MAX_NAME and name.isprintable()
