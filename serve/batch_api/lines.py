"""Checks a file of requests before its batch runs.

An invalid line fails the whole file; an invalid body fails only its request, when the batch runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdxl.params import COUNT_ALIASES
from serve.batch.intake import BATCH_LINE, BATCH_URL
from serve.batch.reading import Record, read_jsonl
from serve.errors import Problem, invalid
from serve.models import ImageModel, choose
from serve.settings import MAX_N

MOST_ERRORS = 100


@dataclass
class Checked:
    total: int = 0
    pictures: int = 0
    shares: bool = False
    """whether a request wants pictures as URLs"""
    model: str = ""
    """id of the model of all requests"""
    errors: list[dict[str, Any]] = field(default_factory=list)


def check(path: Path, most: int, models: Sequence[ImageModel]) -> Checked:
    checked, seen = Checked(), set[str]()
    for record in read_jsonl(path):
        checked.total += 1
        if checked.total > most:
            message = f"the file must have at most {most} requests"
            return Checked(errors=[error_of("too_many_requests", message)])
        try:
            check_line(record, seen)
            checked.model = one_model(record.values["body"], checked.model, models)
        except Problem as problem:
            number = int(record.line.rpartition(" ")[2])
            facts = {name: getattr(problem, name) for name in ("code", "message", "param")}
            checked.errors.append({**facts, "line": number})
            if len(checked.errors) >= MOST_ERRORS:
                break
            continue
        body = record.values["body"]
        checked.pictures += pictures_of(body)
        checked.shares = checked.shares or body.get("response_format") == "url"
    if not checked.total:
        checked.errors.append(error_of("empty_file", "the file contains no request"))
    checked.model = checked.model or models[0].id
    return checked


def one_model(body: dict[str, Any], known: str, models: Sequence[ImageModel]) -> str:
    """Return the id of the model of all lines. An unknown model fails only its request."""
    asked = body.get("model")
    try:
        id_ = choose(asked if isinstance(asked, str) else None, models).id
    except Problem:
        return known
    if known and id_ != known:
        message = f"{id_!r}: must be {known!r}, as in the other lines"
        raise invalid("model", message, "mismatched_model")
    return id_


def check_line(record: Record, seen: set[str]) -> None:
    """Raise Problem for a line that fails the whole file."""
    if record.error is not None:
        raise invalid(None, record.error, "invalid_json_line")
    for name in BATCH_LINE:
        if name not in record.values:
            raise invalid(name, f"{name}: is missing", "missing_required_parameter")
    for name in record.values:
        if name not in BATCH_LINE:
            # The batch's record must be valid Unicode.
            shown = name[:100].encode(errors="backslashreplace").decode()
            needed = f"{shown} is not a field of a line; must be one of {', '.join(BATCH_LINE)}"
            raise invalid(shown, needed, "unknown_parameter")
    id_, method, url, body = (record.values[name] for name in BATCH_LINE)
    # Other invalid ids fail only their request.
    if isinstance(id_, str) and id_ in seen:
        raise invalid("custom_id", f"{id_[:100]!r} is in an earlier line", "duplicate_custom_id")
    seen.add(str(id_))
    if method != "POST":
        raise invalid("method", f"method must be POST, got {str(method)[:20]!r}", "invalid_method")
    if url != BATCH_URL:
        needed = f"url must be the batch's endpoint, {BATCH_URL}, got {str(url)[:100]!r}"
        raise invalid("url", needed, "mismatched_endpoint")
    if not isinstance(body, dict):
        raise invalid("body", "body must be an object", "invalid_body")


def error_of(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": None}


def pictures_of(body: dict[str, Any]) -> int:
    """Return a request's number of pictures; 1 for an invalid number, which makes one error."""
    counts = [body[name] for name in ("n", *COUNT_ALIASES) if name in body]
    n = counts[0] if len(counts) == 1 else None
    return n if type(n) is int and 1 <= n <= MAX_N else 1
