"""What one line of the input asks for, and the names that follow from it: id, seed, file, shard.

All of it follows from the input alone, so a rerun on any node and in any order makes the same
picture under the same name. It reads no files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from sdxl.params import DRAWN_SEEDS, GenerationParams, InvalidParams
from serve.errors import Problem

MAX_ID = 512
"""characters"""
MAX_NAME = 200
"""bytes of a file's name that an id may take by itself; file systems allow 255 in all"""
ID_HEX = 24


@dataclass(frozen=True)
class BatchRow:
    """One picture to make, or why it cannot be: `error` is set where the input is wrong."""

    ordinal: int
    """place among all rows of the input, from 0"""
    line: str
    """where it stands in the input, for a person"""
    id: str
    params: GenerationParams | None = None
    error: str | None = None
    image: str | None = None
    """what it is made from, of an edit: a path or a data URL"""
    mask: str | None = None
    format: str = ""
    """the job's unless the row says another"""
    compression: int | None = None
    problem: Problem | None = None
    """the error in the service's words"""


@dataclass(frozen=True)
class ShardPiece:
    """Rows of one shard that are leased together: all of them, until some made trouble."""

    shard: int
    rows: tuple[BatchRow, ...]
    tries: int = 0
    """how often it ended in trouble, nothing gained"""

    @property
    def is_suspect(self) -> bool:
        """It is leased by itself, so that it alone is to blame."""
        return self.tries >= 2


def content_id(given: Mapping[str, Any]) -> str:
    """Of what a row says itself, right or wrong; defaults may change without its name changing."""
    text = json.dumps(
        given, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=repr
    )
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:ID_HEX]


def checked_id(given: object) -> str:
    """A row's `id` or a line's `custom_id`. Raises InvalidParams."""
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise InvalidParams("id", given, "needed text")
    id_ = str(given)
    if not 1 <= len(id_) <= MAX_ID:
        raise InvalidParams("id", id_[:40], f"needed 1 to {MAX_ID} characters")
    try:
        id_.encode()
    except UnicodeEncodeError:
        raise InvalidParams("id", id_, "needed valid Unicode, without lone surrogates") from None
    return id_


def seed_of(id_: str) -> int:
    digest = hashlib.sha256(b"seed of " + id_.encode()).digest()
    return int.from_bytes(digest[:8], "big") % DRAWN_SEEDS


def stem_of(id_: str) -> str:
    """A file name for an id, without its ending: one for one, and without any character that means
    something to a file system, a shell or a URL."""
    stem = quote(id_, safe="")
    if stem.startswith("."):
        stem = "%2E" + stem[1:]
    return bounded(stem, id_)


def bounded(stem: str, id_: str) -> str:
    """The stem, or where no file could have it as its name, its beginning and the id's digest."""
    if len(stem) <= MAX_NAME:
        return stem
    # Longer than any that is whole, and so the name of no other id.
    return f"{stem[:MAX_NAME]}-{hashlib.sha256(id_.encode()).hexdigest()[:ID_HEX]}"


def shard_name(shard: int) -> str:
    return f"{shard:06d}"
