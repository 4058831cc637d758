"""One row of a job, and what follows from it: id, seed, names of its file and shard.

These follow from the input alone, so a rerun on any node and in any order makes the same picture
under the same name. It reads no files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sdxl.params import DRAWN_SEEDS, GenerationParams, InvalidParams
from serve.errors import Problem

MAX_ID = 512
"""Characters."""
MAX_NAME = 200
"""Bytes of an id in a file's name; file systems allow 255 for the whole name."""
ID_HEX = 24
Maps = Mapping[str, bytes | Path]
"""Pictures' files or their paths, by `image` in the parameters."""


@dataclass(frozen=True)
class BatchRow:
    """One picture to make, or the `error` in its input."""

    ordinal: int
    """number among all rows of the input, from 0"""
    line: str
    """its place in the input, for people"""
    id: str
    params: GenerationParams | None = None
    error: str | None = None
    image: str | None = None
    """path or data URL of an edit's image"""
    mask: str | None = None
    maps: Maps = field(default_factory=dict)
    """pictures of ControlNets and image prompts"""
    format: str = ""
    """empty: the job's format"""
    compression: int | None = None
    problem: Problem | None = None
    """the error as the service would answer it"""


@dataclass(frozen=True)
class ShardPiece:
    """Rows of one shard that are leased together: all rows, or after a failure the open ones."""

    shard: int
    rows: tuple[BatchRow, ...]
    tries: int = 0
    """how often it failed without progress"""

    @property
    def is_suspect(self) -> bool:
        """Whether it is leased alone, so that no other piece can cause its next failure."""
        return self.tries >= 2


def content_id(given: Mapping[str, Any]) -> str:
    """Digest a row's values without defaults, also invalid ones."""
    text = json.dumps(
        given, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=repr
    )
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:ID_HEX]


def checked_id(given: object) -> str:
    """Check a row's `id` or a line's `custom_id`. Raises InvalidParams."""
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise InvalidParams("id", given, "must be text")
    id_ = str(given)
    if not 1 <= len(id_) <= MAX_ID:
        raise InvalidParams("id", id_[:40], f"must have 1 to {MAX_ID} characters")
    try:
        id_.encode()
    except UnicodeEncodeError:
        raise InvalidParams("id", id_, "must be valid Unicode, without lone surrogates") from None
    return id_


def seed_of(id_: str) -> int:
    digest = hashlib.sha256(b"seed of " + id_.encode()).digest()
    return int.from_bytes(digest[:8], "big") % DRAWN_SEEDS


def stem_of(id_: str) -> str:
    """Return an id's file name without suffix: unique, safe for file systems, shells and URLs."""
    stem = quote(id_, safe="")
    if stem.startswith("."):
        stem = "%2E" + stem[1:]
    return bounded(stem, id_)


def bounded(stem: str, id_: str) -> str:
    """Return the stem, or if it is too long its beginning and the id's digest."""
    if len(stem) <= MAX_NAME:
        return stem
    # This is longer than any stem that is not cut, so no other id has this name.
    return f"{stem[:MAX_NAME]}-{hashlib.sha256(id_.encode()).hexdigest()[:ID_HEX]}"


def shard_name(shard: int) -> str:
    return f"{shard:06d}"
