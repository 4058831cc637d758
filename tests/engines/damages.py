"""Damages to whole files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[dict[str, Any]], object]


def editor(name: str) -> Callable[[Path, Change], None]:
    """Return a function that changes the JSON file of this name in a folder."""

    def edit(folder: Path, change: Change) -> None:
        path = folder / name
        value = json.loads(path.read_text(encoding="utf-8"))
        change(value)
        path.write_text(json.dumps(value), encoding="utf-8")

    return edit


def flip_a_byte(path: Path, *, is_dated_back: bool = False) -> None:
    """Change the last byte. With `is_dated_back`, restore the times, as an attacker would."""
    status, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    if is_dated_back:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
