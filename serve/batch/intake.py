"""Turns records into rows with checked ids, seeds and parameters, and rows into shards.

An invalid record becomes a row with an error in the same place, so that the shards do not change.
"""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from sdxl.params import PARAMETERS, PICTURED, GenerationParams, InvalidParams, Sizes
from sdxl.presets import UNMEASURED, Presets
from serve.batch.ledger import MAX_TEXT
from serve.batch.reading import COLUMNS, ID, PARAMETERS_BY_COLUMN, Record
from serve.batch.row_pictures import CONTROLS, IMAGE, MASK, controls_in, locate_pictures, places
from serve.batch.rows import BatchRow, Maps, ShardPiece, checked_id, content_id, seed_of
from serve.errors import Problem, invalid, of_params, schema_words
from serve.front.image_orders import check_limits, params_of, served_sizes
from serve.front.openai_images import ImageRequest
from serve.front.sent_pictures import take_pictures
from serve.orders import ModelCard
from serve.settings import ServeSettings

BATCH_LINE = ("custom_id", "method", "url", "body")
BATCH_URL = "/v1/images/generations"
NOT_IN_BATCHES = ("expand_prompt", "stream", "partial_images")
NOT_IN_JOBS = (*NOT_IN_BATCHES, "output_compression")
"""Fields of a request that a batch or a job of the service, or `sdxl batch`, cannot have."""
IGNORED = ("response_format", "user", "moderation", "style")
"""OpenAI's fields that do not change a picture here."""
DUPLICATES_CACHE_KB = 16_000
RecordParts = tuple[object, Mapping[str, Any], dict[str, Any], int, Maps]
"""The record's id or None, the values for its content id, the parameters, the number of pictures,
and the files of ControlNets and image prompts."""
ANY_STEPS = ServeSettings(max_steps=1000)


@dataclass(frozen=True)
class Intake:
    defaults: Mapping[str, Any]
    """parameters given as flags"""
    n: int
    model: str
    sizes: Sizes | None
    """None if only the service knows them"""
    format: str | None
    """None: each line sets its format"""
    presets: Presets = field(default_factory=lambda: UNMEASURED)
    """presets for `quality` in lines of OpenAI's Batch API"""
    limits: ServeSettings = ANY_STEPS
    """limits for lines of OpenAI's Batch API"""
    maps: Mapping[str, str] = field(default_factory=dict)
    """files of the pictures in `defaults` by digest"""
    are_ids_checked: bool = False
    """whether the records' ids are unique; the second picture of "a" may still be "a-1", too"""

    def rows(self, records: Iterable[Record]) -> Iterator[BatchRow]:
        """Yield the numbered rows. A row with the id of an earlier row becomes an error."""
        ordinals = itertools.count()
        with closing(UsedIds()) as used:
            for record in records:
                yield from self._rows_of(record, ordinals, used)

    def shards(self, records: Iterable[Record], size: int) -> Iterator[ShardPiece]:
        rows = self.rows(records)
        for shard in itertools.count():
            taken = tuple(itertools.islice(rows, size))
            if not taken:
                return
            yield ShardPiece(shard, taken)

    def _rows_of(
        self, record: Record, ordinals: Iterator[int], used: UsedIds
    ) -> Iterator[BatchRow]:
        ordinal = next(ordinals)
        try:
            images, files = self._images(record, ordinal, used)
        except (InvalidParams, Problem) as error:
            given = record.values.get("custom_id", record.values.get("id"))
            id_ = given[:MAX_TEXT] if isinstance(given, str) and given else record.line
            if isinstance(error, InvalidParams):
                text, problem = error.message(error.field, longest=100), of_params(error)
            else:
                text, problem = error.message, error
            # A name in the message may contain invalid Unicode.
            text = text.encode(errors="backslashreplace").decode()
            yield BatchRow(ordinal, record.line, id_, error=text, problem=problem)
            return
        facts: dict[str, Any] = dict(files)
        if not self.format:
            body = record.values["body"]
            facts["format"] = body.get("output_format") or "png"
            facts["compression"] = body.get("output_compression")
        numbers = itertools.chain([ordinal], ordinals)
        for id_, params in images:
            row = BatchRow(next(numbers), record.line, id_, params, **facts)
            yield used.first_or_error(row)

    def _images(
        self, record: Record, ordinal: int, used: UsedIds
    ) -> tuple[list[tuple[str, GenerationParams]], dict[str, Any]]:
        """Return the ids and parameters of a record's pictures, and its files or their places."""
        if record.error is not None:
            raise invalid(None, record.error, "invalid_line")
        is_line = "custom_id" in record.values or "body" in record.values
        read = self._read_batch_line if is_line else self._read_columns
        given, content, values, n, maps = read(record)
        pictures = places(record.values, record.folder)
        id_ = content_id(content) if given is None else checked_id(given)
        ids = [picture_id(id_, i, n) for i in range(n)]
        if (given is None or self.are_ids_checked) and any(map(used.line_of, ids)):
            # An earlier row has the same content, or a row "a-0" comes before two pictures of "a".
            id_ = f"{id_}-row{ordinal}"
        images = [self._image(id_, values, n, i) for i in range(n)]
        for _, params in images:
            for each in params.image_prompts or ():
                if not each.image:
                    raise each.refused("needs its picture")
            # The image may contain a mask, which is known only when the image is read.
            params.for_edit(has_mask=not params.is_upscaled) if pictures else check_plain(params)
            if self.sizes and params.width and params.height:
                params.check_result(served_sizes(ModelCard(self.model, self.sizes), self.limits))
        return images, {**pictures, "maps": maps}

    def _image(
        self, id_: str, values: Mapping[str, Any], n: int, index: int
    ) -> tuple[str, GenerationParams]:
        id_ = picture_id(id_, index, n)
        params = GenerationParams.from_dict(values).without_tags()
        if params.seed is None:
            return id_, params.picture(0, seed_of(id_))
        return id_, params.picture(index, params.seed)

    def _read_columns(self, record: Record) -> RecordParts:
        values = record.values
        for name in values:
            if name not in COLUMNS:
                raise InvalidParams.unknown_field(name, COLUMNS)
        known = PARAMETERS_BY_COLUMN
        given = {known[k].name: value for k, value in values.items() if k in known}
        if controls := controls_in(values, self.defaults.get(CONTROLS)):
            given[CONTROLS] = controls
        merged = self._merge_flags(given, IMAGE in values, MASK in values)
        # An edit has its image's size unless it sets another.
        params = checked_prompt(merged) if IMAGE in values else self._with_size(merged)
        maps: Maps = {}
        for name in PICTURED:
            entries, files = locate_pictures(name, params.get(name), record.folder, self.maps)
            params, maps = {**params, name: entries or None}, {**maps, **files}
        return values.get(ID), values, params, self.n, maps

    def _merge_flags(
        self, given: Mapping[str, Any], is_edit: bool, has_mask: bool
    ) -> dict[str, Any]:
        """Merge flags and a row's values. Deep steps of a preset are dropped if the row changes the
        schedule for which they were tuned."""
        flags = {**self.defaults, **given}
        deep = self.defaults.get("deep_steps")
        tuned = [each for each in self.presets.values() if deep and each.deep_steps == deep]
        if not tuned or "deep_steps" in given:
            return flags
        strength = PARAMETERS["strength"].edit_defaults[has_mask] if is_edit else None
        others = {name: value for name, value in flags.items() if name != "deep_steps"}
        return tuned[0].beside(others, edit_strength=strength)

    def _read_batch_line(self, record: Record) -> RecordParts:
        """Read a line of OpenAI's Batch API as the service reads its body."""
        values = record.values
        for name in values:
            if name not in BATCH_LINE:
                raise InvalidParams.unknown_field(name, BATCH_LINE)
        if (values.get("method"), values.get("url")) != ("POST", BATCH_URL):
            given = f"{values.get('method')} {values.get('url')}"
            raise InvalidParams("url", given, f"must be POST {BATCH_URL}")
        request, maps = take_pictures(request_of(values.get("body")))
        for name in NOT_IN_JOBS if self.format else NOT_IN_BATCHES:
            if (value := getattr(request, name)) not in (None, False):
                raise InvalidParams(name, value, "cannot be set in a job; leave it out")
        if self.format and request.output_format not in (None, self.format):
            raise InvalidParams(
                "output_format", request.format, f"must be {self.format}, the job's format"
            )
        # If only the service knows its sizes, it refuses wrong ones.
        sizes = self.sizes or Sizes(1024, 64, 4096)
        card = ModelCard(self.model, sizes, presets=self.presets)
        check_limits(request, card, self.limits)
        params = params_of(request, card, self.limits).as_dict()
        if self.sizes is None and request.size in (None, "auto"):
            params |= {"width": None, "height": None}
        body = {k: v for k, v in values["body"].items() if k not in IGNORED}
        return values.get("custom_id"), body, self._with_size(params), request.n or self.n, maps

    def _with_size(self, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in the size if the model's sizes are known."""
        checked_prompt(values)
        if self.sizes is None:
            for side, other in (("width", "height"), ("height", "width")):
                if values.get(side) is None and values.get(other) is not None:
                    needed = f"must be set beside {other}: a service needs both"
                    raise InvalidParams(side, None, needed)
            return values
        sides = {side: self.sizes.resolve(side, values.get(side)) for side in ("width", "height")}
        return {**values, **sides}


def check_plain(params: GenerationParams) -> None:
    """Refuse parameters that need an image to edit."""
    params.check_plain()
    if name := next((each.name for each in params.controls or () if not each.image), None):
        raise InvalidParams(CONTROLS, None, f"with {name!r}: needs the picture of its map")


def checked_prompt(values: dict[str, Any]) -> dict[str, Any]:
    prompt = values.get("prompt")
    if not isinstance(prompt, str):
        raise InvalidParams("prompt", prompt, "must be text")
    return values


def picture_id(id_: str, index: int, n: int) -> str:
    return id_ if n == 1 else f"{id_}-{index}"


def request_of(body: object) -> ImageRequest:
    try:
        return ImageRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "body"
        raise InvalidParams(field, first["input"], schema_words(first)) from error


class UsedIds:
    """Remembers ids in a temporary database on disk, so that memory does not limit their number."""

    def __init__(self) -> None:
        # The garbage collector may close the database in any thread.
        self._seen = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._seen.execute(f"PRAGMA cache_size = -{DUPLICATES_CACHE_KB}")
        self._seen.execute("PRAGMA synchronous = OFF")
        self._seen.execute("PRAGMA journal_mode = OFF")
        self._seen.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, line TEXT) WITHOUT ROWID")
        # One transaction without an end is fastest, as nothing has to be kept.
        self._seen.execute("BEGIN")

    def close(self) -> None:
        self._seen.close()

    def line_of(self, id_: str) -> str | None:
        """Return the line that used the id, or None."""
        row = self._seen.execute("SELECT line FROM ids WHERE id = ?", (digest_of(id_),)).fetchone()
        return row[0] if row else None

    def first_or_error(self, row: BatchRow) -> BatchRow:
        """Return the row if its id is new, else an error in its place."""
        digest = digest_of(row.id)
        new = self._seen.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (digest, row.line))
        if new.rowcount:
            return row
        error = f"id {row.id!r} is already used in {self.line_of(row.id)}"
        return BatchRow(row.ordinal, row.line, row.id, error=error, problem=invalid("id", error))


def digest_of(id_: str) -> bytes:
    return hashlib.sha256(id_.encode()).digest()[:16]
