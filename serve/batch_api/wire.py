"""Files, batches and jobs over HTTP: requests, answers, and what their routes share."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import BaseModel, ConfigDict, Field

from sdxl.files import OutputError
from serve.batch.intake import BATCH_URL
from serve.batch_api.records import ENDED, BatchRecord, FileRecord, R, Records, WorkRecord, owner_of
from serve.errors import Problem, invalid
from serve.front.access import client_of, origin_of
from serve.front.openai_images import Reply, RequestModel
from serve.settings import ServeSettings

After = Annotated[str | None, Query(max_length=64)]
WINDOW = re.compile(r"([1-9]\d{0,3})([hd])")
HOURS = {"h": 1, "d": 24}
MOST_HOURS = 30 * 24
MIN_LIFE_S, MAX_LIFE_S = 3600, 30 * 24 * 3600
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class ExpiresAfter(RequestModel):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFE_S, le=MAX_LIFE_S)]


class BatchAsked(RequestModel):
    input_file_id: str
    endpoint: Annotated[str, Field(description=f"{BATCH_URL} alone")]
    completion_window: Annotated[str, Field(description="such as 24h or 7d; at most 30d")]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class FileObject(Reply):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: FileRecord) -> FileObject:
        return cls(**same_fields(cls, file))


class FileDeleted(Reply):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class RequestCounts(Reply):
    total: int
    completed: int
    failed: int


class BatchUsage(Reply):
    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens"], int] = Field(default={"cached_tokens": 0})
    output_tokens: int = 0
    output_tokens_details: dict[Literal["reasoning_tokens"], int] = Field(
        default={"reasoning_tokens": 0}
    )
    total_tokens: int


class BatchErrors(Reply):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


class BatchObject(BaseModel):
    """OpenAI's, and how far it is: position, eta_s, images_per_s, pictures."""

    model_config = ConfigDict(extra="forbid")

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    position: int | None
    """number of the owner's batches before this one; 0: being made"""
    eta_s: float | None
    images_per_s: float
    pictures: RequestCounts

    @classmethod
    def of(cls, batch: BatchRecord, cancelling_at: int | None = None) -> BatchObject:
        status = "cancelling" if cancelling_at and not batch.is_ended else batch.status
        tokens, failed = batch.prompt_tokens, batch.failed
        facts = same_fields(cls, batch) | {
            "status": status,
            "cancelling_at": cancelling_at or batch.cancelling_at,
            "model": batch.model or None,
            "errors": BatchErrors(data=batch.errors) if batch.errors else None,
            "usage": BatchUsage(input_tokens=tokens, total_tokens=tokens),
            "request_counts": RequestCounts(
                total=batch.total, completed=batch.completed, failed=failed
            ),
            "pictures": RequestCounts(
                total=batch.pictures, completed=batch.pictures_done, failed=failed
            ),
        }
        facts |= {f"{end}_at": batch.ended_at if status == end else None for end in ENDED}
        return cls(**facts)


class Page(Reply):
    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page):
    data: list[FileObject]


class BatchList(Page):
    data: list[BatchObject]


def same_fields(kind: type[BaseModel], record: FileRecord | WorkRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name in kind.model_fields}


def window_s(text: str) -> int:
    match = WINDOW.fullmatch(text)
    hours = int(match[1]) * HOURS[match[2]] if match else 0
    if not 1 <= hours <= MOST_HOURS:
        message = f"completion_window must be 24h, or 1h to 30d, got {text[:20]!r}"
        raise invalid("completion_window", message)
    return hours * 3600


def owner_in(request: Request) -> str:
    return owner_of(getattr(request.state, "key", None))


def facts_of(request: Request, settings: ServeSettings) -> dict[str, Any]:
    """Return the fields of a new batch or job that follow from the HTTP request."""
    now_s = time.time()
    return {
        "owner": owner_in(request),
        "client": client_of(request, settings.client_header)[0],
        "secret": secrets.token_hex(24),
        "origin": origin_of(request, settings.public_url),
        "created_at": int(now_s),
        "arrived_s": now_s,
    }


def page_of(
    records: Sequence[R], after: str | None, limit: int
) -> tuple[Sequence[R], dict[str, Any]]:
    """Return a page of records, and OpenAI's fields for its ends."""
    ids = [each.id for each in records]
    if after is not None and after not in ids:
        raise invalid("after", f"after: there is no {after!r}")
    rest = records[ids.index(after) + 1 :] if after else records
    page = rest[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return page, {"first_id": first, "last_id": last, "has_more": len(rest) > limit}


def with_room(write: Callable[[], None]) -> None:
    """Raise Problem 507 if the store cannot be written."""
    try:
        write()
    except OutputError as error:
        message = "Files cannot be stored now; the service's log says why."
        raise Problem(507, message, None, "batches_full", 60.0) from error


def cancel(records: Records, work: WorkRecord) -> None:
    """Ask the runner to cancel; a repeated request changes nothing."""
    if work.is_ended and work.status != "cancelled":
        message = f"The {work.noun} is {work.status} and cannot be cancelled."
        raise Problem(409, message, "id", f"{work.noun}_ended")
    if not work.is_ended and records.asked_to_cancel(work.id) is None:
        with_room(lambda: records.ask_to_cancel(work))
