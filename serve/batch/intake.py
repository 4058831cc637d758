"""Records to rows: ids, seeds and parameters checked before any work, and rows into shards.

A record that is wrong becomes a row with its error and keeps its place, so that the shards of all
others stay as they are. It makes nothing and writes nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sdxl.params import PARAMETERS, GenerationParams, InvalidParams, Sizes
from serve.batch.editing import IMAGE, places
from serve.batch.reading import COLUMNS, ID, Record
from serve.batch.rows import BatchRow, ShardPiece, content_id, seed_of, stem_of
from serve.errors import Problem
from serve.front.image_orders import check_limits, params_of
from serve.front.openai_images import ImageRequest
from serve.orders import ModelCard
from serve.settings import ServeSettings

PARAM_NAMES = {each.column: each.name for each in PARAMETERS.values()}
BATCH_LINE = ("custom_id", "method", "url", "body")
BATCH_URL = "/v1/images/generations"
OF_THE_SERVICE = ("expand_prompt", "output_compression", "stream", "partial_images")
"""What only a service's own answer can have."""
IGNORED = ("response_format", "user", "moderation", "style")
"""Fields of OpenAI's that do not change a picture here."""
DUPLICATES_CACHE_KB = 16_000
ANY_STEPS = ServeSettings(max_steps=1000, max_prompt_chars=10_000)


@dataclass(frozen=True)
class Intake:
    """`sizes` is None where only the service knows what its model takes."""

    defaults: Mapping[str, Any]
    """parameters that were given as flags"""
    n: int
    model: str
    sizes: Sizes | None
    format: str

    def rows(self, records: Iterable[Record]) -> Iterator[BatchRow]:
        """Numbered; of two rows with one id, the second is an error."""
        return unique(self._numbered(records))

    def shards(self, records: Iterable[Record], size: int) -> Iterator[ShardPiece]:
        rows = self.rows(records)
        for shard in itertools.count():
            taken = tuple(itertools.islice(rows, size))
            if not taken:
                return
            yield ShardPiece(shard, taken)

    def _numbered(self, records: Iterable[Record]) -> Iterator[BatchRow]:
        ordinals = itertools.count()
        return (row for record in records for row in self._of(record, ordinals))

    def _of(self, record: Record, ordinals: Iterator[int]) -> Iterable[BatchRow]:
        try:
            if record.error is not None:
                raise Unreadable(record.error)
            if "custom_id" in record.values or "body" in record.values:
                id_, values, n = self._of_batch_line(record.values)
            else:
                id_, values, n = self._of_columns(record.values)
            pictures = places(record.values, record.folder)
            images = [self._image(id_, values, n, i) for i in range(n)]
            for _, params in images:
                # Whether there is a mask is known when the image is read.
                params.for_edit(has_mask=True) if pictures else params.check_plain()
        except (InvalidParams, Problem, Unreadable) as error:
            given = record.values.get("custom_id", record.values.get("id"))
            shown = given if isinstance(given, str) and given else record.line
            return [BatchRow(next(ordinals), record.line, shown, error=str(error))]
        return [
            BatchRow(next(ordinals), record.line, id_, params, **pictures) for id_, params in images
        ]

    def _image(
        self, id_: str, values: Mapping[str, Any], n: int, index: int
    ) -> tuple[str, GenerationParams]:
        id_ = id_ if n == 1 else f"{id_}-{index}"
        stem_of(id_)
        seed = values.get("seed")
        if seed is not None and index:
            GenerationParams(seed=seed)
            seed += index
        seed = seed_of(id_) if seed is None else seed
        return id_, GenerationParams.from_dict({**values, "seed": seed})

    def _of_columns(self, values: Mapping[str, Any]) -> tuple[str, dict[str, Any], int]:
        for name in values:
            if name not in COLUMNS:
                raise InvalidParams(name, values[name], f"needed one of {', '.join(COLUMNS)}")
        given = {PARAM_NAMES[k]: v for k, v in values.items() if k in PARAM_NAMES}
        whole = {**self.defaults, **given}
        # An edit's size is its image's, unless it says another one.
        filled = checked_prompt(whole) if IMAGE in values else self._sized(whole)
        return id_of(values.get(ID), values), filled, self.n

    def _of_batch_line(self, values: Mapping[str, Any]) -> tuple[str, dict[str, Any], int]:
        """A line of OpenAI's Batch API means what the service would make of its body."""
        for name in values:
            if name not in BATCH_LINE:
                raise InvalidParams(name, values[name], f"needed one of {', '.join(BATCH_LINE)}")
        if (values.get("method"), values.get("url")) != ("POST", BATCH_URL):
            asked = f"{values.get('method')} {values.get('url')}"
            raise InvalidParams("url", asked, f"needed POST {BATCH_URL}")
        request = request_of(values.get("body"))
        for name in OF_THE_SERVICE:
            if (value := getattr(request, name)) not in (None, False):
                raise InvalidParams(name, value, "a job has no such thing; leave it out")
        if request.format != self.format and request.output_format is not None:
            raise InvalidParams("output_format", request.format, f"the job makes {self.format}")
        # Where the service alone knows its sizes, it is the one to refuse.
        sizes = self.sizes or Sizes(1024, 64, 4096)
        card = ModelCard(self.model, sizes)
        check_limits(request, card, ANY_STEPS)
        params = params_of(request, card, ANY_STEPS).as_dict()
        if self.sizes is None and request.size in (None, "auto"):
            params |= {"width": None, "height": None}
        body = {k: v for k, v in values["body"].items() if k not in IGNORED}
        return id_of(values.get("custom_id"), body), self._sized(params), request.n or self.n

    def _sized(self, values: dict[str, Any]) -> dict[str, Any]:
        """With its size filled, where that is known here."""
        checked_prompt(values)
        if self.sizes is None:
            return values
        sides = {side: self.sizes.resolve(side, values.get(side)) for side in ("width", "height")}
        return {**values, **sides}


def checked_prompt(values: dict[str, Any]) -> dict[str, Any]:
    prompt = values.get("prompt", "")
    if not (isinstance(prompt, str) and prompt.strip()):
        raise InvalidParams("prompt", prompt, "needed text")
    return values


class Unreadable(ValueError):
    """A line that holds no record."""


def id_of(given: object, values: Mapping[str, Any]) -> str:
    if given is None:
        return content_id(values)
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise InvalidParams("id", given, "needed text")
    return str(given)


def request_of(body: object) -> ImageRequest:
    try:
        return ImageRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise InvalidParams(field, first["input"], first["msg"]) from error


def unique(rows: Iterable[BatchRow]) -> Iterator[BatchRow]:
    """Ids that came before are kept in a database on disk that nobody else sees: their number is
    not bounded by memory."""
    # A job that stops leaves its rows to the collector, which may run in any thread.
    connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    with closing(connection) as seen:
        seen.execute(f"PRAGMA cache_size = -{DUPLICATES_CACHE_KB}")
        seen.execute("PRAGMA synchronous = OFF")
        seen.execute("PRAGMA journal_mode = OFF")
        seen.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, line TEXT) WITHOUT ROWID")
        # One transaction that never ends: nothing need be kept.
        seen.execute("BEGIN")
        for row in rows:
            yield row if row.error is not None else first_or_error(row, seen)


def first_or_error(row: BatchRow, seen: sqlite3.Connection) -> BatchRow:
    digest = hashlib.sha256(row.id.encode()).digest()[:16]
    if seen.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (digest, row.line)).rowcount:
        return row
    (line,) = seen.execute("SELECT line FROM ids WHERE id = ?", (digest,)).fetchone()
    error = f"id: {row.id!r} is not allowed; {line} has it already (to make several, --n)"
    return BatchRow(row.ordinal, row.line, row.id, error=error)
