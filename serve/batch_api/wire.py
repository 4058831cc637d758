"""Files and batches in OpenAI's formats: requests and answers."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serve.batch_api.records import ENDED, BatchRecord, FileRecord, WorkRecord
from serve.errors import invalid
from serve.front.openai_images import Reply, RequestModel

ENDPOINT = "/v1/images/generations"
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
    endpoint: Annotated[str, Field(description=f"{ENDPOINT} alone")]
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
    input_tokens_details: dict[Literal["cached_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int

    @classmethod
    def of_prompts(cls, tokens: int) -> BatchUsage:
        return cls(
            input_tokens=tokens,
            input_tokens_details={"cached_tokens": 0},
            output_tokens=0,
            output_tokens_details={"reasoning_tokens": 0},
            total_tokens=tokens,
        )


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
        requests, done = (batch.total, batch.completed), (batch.pictures, batch.pictures_done)
        counts = [
            RequestCounts(total=total, completed=completed, failed=batch.failed)
            for total, completed in (requests, done)
        ]
        facts = same_fields(cls, batch) | {
            "status": status,
            "cancelling_at": cancelling_at or batch.cancelling_at,
            "model": batch.model or None,
            "errors": BatchErrors(data=batch.errors) if batch.errors else None,
            "usage": BatchUsage.of_prompts(batch.prompt_tokens),
            "request_counts": counts[0],
            "pictures": counts[1],
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
