"""The one source of truth: what became of each row of a shard, a line for each, later lines win.

A line counts once it is whole. One that a crash tore is no line, so its row is made again. What a
line lies in (a file that grows, or numbered parts) is the store's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A picture, or with `error` why there is none."""

    ordinal: int
    id: str
    line: str
    run: str
    """which start of the job wrote it"""
    file: str = ""
    sha256: str = ""
    size: int = 0
    """bytes"""
    seed: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    worker: str = ""
    error: str | None = None

    def as_line(self) -> bytes:
        return as_json(asdict(self)) + b"\n"


def as_json(facts: object) -> bytes:
    """What a broken input holds may be no Unicode: it becomes JSON's own escapes."""
    return json.dumps(facts, ensure_ascii=False).encode(errors="backslashreplace")


def entries(data: bytes) -> dict[int, Entry]:
    """By ordinal."""
    found = (_entry(line) for line in data.split(b"\n") if line)
    return {entry.ordinal: entry for entry in found if entry is not None}


def in_order(found: Iterable[Entry]) -> list[Entry]:
    return sorted(found, key=lambda entry: entry.ordinal)


def _entry(line: bytes) -> Entry | None:
    try:
        return Entry(**json.loads(line))
    except (ValueError, TypeError):
        # Torn by a crash.
        return None
