"""The record of what is done: a line for each finished row of a shard. The last line counts.

A line that a crash cut off does not count, so its row is made again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sdxl.params import GenerationParams
from serve.batch.store import Store

FILE = re.compile(r"(images|loose)/\d{6,20}(\.tar)?/[\w%~-][\w.%~-]{0,254}", re.ASCII)
"""Names of picture files; a line with another name was not written by a job."""
MAX_LINE = 2**20
"""Bytes; the longest request takes a quarter of them."""
MAX_TEXT = 4096
"""Characters of a dead letter's texts: the row's values in them may be as long as a line."""
MAX_NUMBER = 2**63


@dataclass(frozen=True)
class Entry:
    """A picture, or the `error` of a dead letter."""

    ordinal: int
    id: str
    line: str
    run: str
    """the run of the job that wrote it"""
    file: str = ""
    sha256: str = ""
    size: int = 0
    """bytes"""
    seed: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    """digests of an edit's image and mask"""
    timings: dict[str, float] = field(default_factory=dict)
    worker: str = ""
    engine: str = ""
    """the engine's label"""
    error: str | None = None
    problem: dict[str, Any] = field(default_factory=dict)
    """the error as the service would answer it"""
    prompt_tokens: int = 0

    def as_line(self) -> bytes:
        return as_json(asdict(self)) + b"\n"


def as_json(facts: object) -> bytes:
    """Encode as JSON; invalid Unicode from broken inputs becomes escapes."""
    return json.dumps(facts, ensure_ascii=False).encode(errors="backslashreplace")


def entries(data: bytes) -> dict[int, Entry]:
    parsed = (_entry(line) for line in data.split(b"\n") if line)
    return {entry.ordinal: entry for entry in parsed if entry is not None}


def read(store: Store, shard: str) -> dict[int, Entry]:
    return entries(store.ledger(shard))


def read_all(store: Store) -> Iterator[Entry]:
    """Yield the entries in the order of the input."""
    for shard in store.ledgers():
        yield from in_order(read(store, shard).values())


def in_order(unsorted: Iterable[Entry]) -> list[Entry]:
    return sorted(unsorted, key=lambda entry: entry.ordinal)


def _entry(line: bytes) -> Entry | None:
    """Return the line's entry; None if a crash cut the line off, or no job wrote it."""
    if len(line) > MAX_LINE:
        return None
    try:
        entry = Entry(**json.loads(line))
        return entry if _is_sound(entry) else None
    except (AttributeError, RecursionError, TypeError, ValueError):
        return None


def _is_sound(entry: Entry) -> bool:
    """Check the types and the file's name."""
    texts = [entry.id, entry.line, entry.run, entry.sha256, entry.worker, entry.engine]
    texts += [entry.file, *entry.origin, *entry.origin.values()]
    numbers = [entry.ordinal, entry.size, entry.seed, entry.prompt_tokens]
    sides = [entry.params.get(side) for side in ("width", "height")]
    numbers += [side for side in sides if side is not None]
    GenerationParams.from_dict(entry.params)
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(entry.error, str | None)
        and is_problem(entry.problem)
        and (entry.error is not None or is_picture(entry))
        and all(type(number) is int and 0 <= number < MAX_NUMBER for number in numbers)
        and all(type(s) in (int, float) and abs(s) < MAX_NUMBER for s in entry.timings.values())
    )


def is_problem(facts: Any) -> bool:
    return facts == {} or (
        facts.keys() == {"status", "message", "param", "code"}
        and type(facts["status"]) is int
        and 400 <= facts["status"] < 600
        and isinstance(facts["message"], str)
        and all(isinstance(facts[name], str | None) for name in ("param", "code"))
    )


def is_picture(entry: Entry) -> bool:
    # The manifest needs valid Unicode: this raises otherwise.
    f"{entry.id}{entry.sha256}".encode()
    return "prompt" in entry.params and FILE.fullmatch(entry.file) is not None
