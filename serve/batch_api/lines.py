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
from serve.errors import Problem
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


class WrongLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


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
        except WrongLine as error:
            number = int(record.line.rpartition(" ")[2])
            checked.errors.append(error_of(error.code, str(error), error.param, number))
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
        raise WrongLine(
            "mismatched_model", f"{id_!r}: must be {known!r}, as in the other lines", "model"
        )
    return id_


def check_line(record: Record, seen: set[str]) -> None:
    if record.error is not None:
        raise WrongLine("invalid_json_line", record.error)
    for name in BATCH_LINE:
        if name not in record.values:
            raise WrongLine("missing_required_parameter", f"{name}: is missing", name)
    for name in record.values:
        if name not in BATCH_LINE:
            # The batch's record must be valid Unicode.
            shown = name[:100].encode(errors="backslashreplace").decode()
            needed = f"{shown} is not a field of a line; must be one of {', '.join(BATCH_LINE)}"
            raise WrongLine("unknown_parameter", needed, shown)
    id_, method, url, body = (record.values[name] for name in BATCH_LINE)
    # Other invalid ids fail only their request.
    if isinstance(id_, str) and id_ in seen:
        raise WrongLine("duplicate_custom_id", f"{id_[:100]!r} is in an earlier line", "custom_id")
    seen.add(str(id_))
    if method != "POST":
        raise WrongLine(
            "invalid_method", f"method must be POST, got {str(method)[:20]!r}", "method"
        )
    if url != BATCH_URL:
        needed = f"url must be the batch's endpoint, {BATCH_URL}, got {str(url)[:100]!r}"
        raise WrongLine("mismatched_endpoint", needed, "url")
    if not isinstance(body, dict):
        raise WrongLine("invalid_body", "body must be an object", "body")


def error_of(
    code: str, message: str, param: str | None = None, line: int | None = None
) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}


def pictures_of(body: dict[str, Any]) -> int:
    """Return a request's number of pictures; 1 for an invalid number, which makes one error."""
    n = next((body[name] for name in ("n", *COUNT_ALIASES) if name in body), None)
    return n if type(n) is int and 1 <= n <= MAX_N else 1
