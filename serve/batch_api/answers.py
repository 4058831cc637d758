"""Makes the lines of a batch's two result files from its input and its job's ledger.

Lines are made while a client reads them, one request at a time, so that no picture is stored twice.
The same batch gives the same lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdxl.deepcache import deep_count, plan_of
from sdxl.params import GenerationParams
from serve import errors
from serve.batch import ledger
from serve.batch.ledger import Entry
from serve.batch.reading import Record, read_jsonl
from serve.batch.rows import shard_name
from serve.batch.store import Store
from serve.batch_api.batch_job import SHARD
from serve.batch_api.lines import pictures_of
from serve.batch_api.records import BatchRecord, Part, id_of
from serve.errors import Problem
from serve.front.openai_images import ImageData, ImageRequest, ImagesResponse, Usage
from serve.front.pictures import filled

NOT_MADE = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "This request was not executed: the batch was cancelled.",
    "failed": "This request was not executed: the batch failed.",
}
LOST = {"code": "picture_missing", "message": "The picture is missing from the service's store."}


@dataclass(frozen=True)
class Answer:
    """One line of a result file: `text` with empty base64, and the pictures to fill in."""

    part: Part
    text: bytes
    files: tuple[Entry, ...] = ()
    is_made: bool = True
    """whether the request was executed"""

    @property
    def size(self) -> int:
        return len(self.text) + sum(4 * ((entry.size + 2) // 3) for entry in self.files)


@dataclass
class Counts:
    completed: int = 0
    failed: int = 0
    pictures: int = 0
    prompt_tokens: int = 0
    sizes: dict[Part, int] = field(default_factory=lambda: {"output": 0, "errors": 0})


def count(batch: BatchRecord, path: Path, store: Store, status: str) -> Counts:
    """Count the results of a batch that ends with this status."""
    counts = Counts()
    for answer, entries in answers_of(batch, path, store, status):
        counts.sizes[answer.part] += answer.size
        if answer.part == "output":
            counts.completed += 1
            counts.pictures += len(entries)
            counts.prompt_tokens += sum(entry.prompt_tokens for entry in entries)
        elif answer.is_made:
            counts.failed += 1
    return counts


def lines(batch: BatchRecord, path: Path, store: Store, part: Part) -> Iterator[bytes]:
    for answer, _ in answers_of(batch, path, store, batch.status):
        if answer.part == part:
            try:
                files = [store.get(entry.file) for entry in answer.files]
            except FileNotFoundError:
                # The response has announced its length, so this line must be as long.
                facts = json.loads(answer.text) | {"response": None, "error": LOST}
                yield json.dumps(facts).encode().ljust(answer.size - 1) + b"\n"
                continue
            yield from filled(answer.text, files)


def answers_of(
    batch: BatchRecord, path: Path, store: Store, status: str
) -> Iterator[tuple[Answer, list[Entry]]]:
    """Yield the answers to all requests in the input's order, with their ledger entries."""
    entries = ledger.read_all(store)
    entry = next(entries, None)
    for record in read_jsonl(path):
        of_line = list[Entry]()
        while entry is not None and entry.line == record.line:
            of_line.append(entry)
            entry = next(entries, None)
        yield answer_of(batch, record, of_line, status), of_line


def answer_of(batch: BatchRecord, record: Record, entries: list[Entry], status: str) -> Answer:
    dead = next((entry for entry in entries if entry.error is not None), None)
    if dead is not None:
        problem = Problem(**dead.problem) if dead.problem else errors.unexpected()
        response = response_of(batch, record, problem.status, problem.body())
        return Answer("errors", line_of(batch, record, response, None))
    if len(entries) < pictures_of(record.values["body"]):
        error = {"code": f"batch_{status}", "message": NOT_MADE.get(status, "Not executed.")}
        return Answer("errors", line_of(batch, record, None, error), is_made=False)
    asked: ImageRequest = ImageRequest.model_construct(**record.values["body"])
    body = body_of(batch, asked, entries)
    text = line_of(batch, record, response_of(batch, record, 200, body), None)
    return Answer("output", text, () if asked.response_format == "url" else tuple(entries))


def line_of(
    batch: BatchRecord, record: Record, response: dict[str, Any] | None, error: Any
) -> bytes:
    facts = {
        "id": id_of("batch_req_", batch.id, record.line),
        "custom_id": record.values["custom_id"],
        "response": response,
        "error": error,
    }
    return json.dumps(facts).encode() + b"\n"


def response_of(batch: BatchRecord, record: Record, status: int, body: Any) -> dict[str, Any]:
    request_id = id_of("batch_req_", batch.id, record.line).removeprefix("batch_")
    return {"status_code": status, "request_id": request_id, "body": body}


def body_of(batch: BatchRecord, asked: ImageRequest, entries: list[Entry]) -> dict[str, Any]:
    """Return the body that `/v1/images/generations` would have answered."""
    params = entries[0].params
    reply = ImagesResponse(
        created=batch.finalizing_at or batch.created_at,
        data=[data_of(batch, asked, entry) for entry in entries],
        output_format=asked.format,
        size="{}x{}".format(*GenerationParams.from_dict(params).result_size),
        quality=asked.effective_quality,
        model=batch.model,
        usage=Usage.of(sum(entry.prompt_tokens for entry in entries)),
        safety_identifier=asked.identifier,
    )
    return reply.model_dump(exclude_none=True)


def data_of(batch: BatchRecord, asked: ImageRequest, entry: Entry) -> ImageData:
    params = GenerationParams.from_dict(entry.params)
    deep = sum(deep_count(plan_of(leg)) for leg in params.legs)
    facts: dict[str, Any] = {
        "seed": entry.seed,
        "timings": entry.timings,
        "deep_steps": deep,
        "shallow_steps": params.all_steps - deep,
    }
    if asked.response_format == "url":
        name = f"{entry.ordinal}.{asked.format}"
        return ImageData(url=f"{batch.origin}/v1/results/{batch.secret}/{name}", **facts)
    return ImageData(b64_json="", **facts)


def picture(store: Store, ordinal: int) -> tuple[str, bytes] | None:
    entry = ledger.read(store, shard_name(ordinal // SHARD)).get(ordinal)
    if entry is None or entry.error is not None:
        return None
    with suppress(FileNotFoundError):
        return entry.file, store.get(entry.file)
    return None
