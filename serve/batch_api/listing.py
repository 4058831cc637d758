"""Shared by the routes of files, batches and jobs: facts of a request, pages of a list, and the
error of a full store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import Query, Request

from sdxl.files import OutputError
from serve.batch_api.records import R, owner_of
from serve.errors import Problem, invalid
from serve.front.access import client_of, origin_of
from serve.settings import ServeSettings

After = Annotated[str | None, Query(max_length=64)]


def owner_in(request: Request) -> str:
    return owner_of(getattr(request.state, "key", None))


def facts_of(request: Request, settings: ServeSettings, now_s: float) -> dict[str, Any]:
    """Return the fields of a new batch or job that follow from the HTTP request."""
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
