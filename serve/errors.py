"""The one error type for clients, in OpenAI's envelope.

The text of an unexpected exception is never sent: it may contain a path. It knows no HTTP server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sdxl.params import PARAMETERS, InvalidParams
from sdxl.suggestions import did_you_mean

INVALID, SERVER, RATE = "invalid_request_error", "server_error", "rate_limit_error"
OTHER_MODEL = "other_model"
TYPES = {401: "authentication_error", 403: "permission_error", 429: RATE}


@dataclass
class Problem(Exception):
    """An error for clients. Every field has a default, so that pickling works."""

    status: int = 500
    message: str = ""
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def type(self) -> str:
        return TYPES.get(self.status, SERVER if self.status >= 500 else INVALID)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields except `retry_after_s`."""
        names = ("status", "message", "param", "code")
        return {name: getattr(self, name) for name in names}

    def body(self) -> dict[str, Any]:
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def invalid(param: str | None, message: str, code: str = "invalid_value") -> Problem:
    return Problem(400, message, param, code)


def of_params(error: InvalidParams) -> Problem:
    known = PARAMETERS.get(error.field)
    param = known.client_name if known else error.field
    return invalid(param, error.message(param, longest=100))


def schema_words(error: Mapping[str, Any]) -> str:
    """Word a Pydantic error like our own errors: "must be ..."."""
    if error["type"] == "missing":
        return "is required"
    return re.sub(r"^\w+ should ", "must ", error["msg"].removeprefix("Value error, "))


def of_schema(field: str, error: Mapping[str, Any]) -> str:
    words, value = schema_words(error), error.get("input")
    if not isinstance(value, str | int | float) or ", got " in words:
        value = None
    choices = error["ctx"]["expected"].split("'")[1::2] if error["type"] == "literal_error" else ()
    return InvalidParams(field, value, words, did_you_mean(value, choices)).message(field, 100)


def of_status(status: int) -> Problem:
    """Make the error of a status that the HTTP layer chose, such as 405."""
    phrase = HTTPStatus(status).phrase
    return Problem(status, f"{phrase}.", None, phrase.lower().replace(" ", "_"))


def unexpected() -> Problem:
    return Problem(500, "The server failed; its log says why.", None, "internal_error")


def starting() -> Problem:
    return Problem(503, "The model is still loading.", None, "starting", 5.0)


def other_model() -> Problem:
    """Make the error of a replica that was replaced by one with another model."""
    return Problem(503, "The model is being replaced by another one.", None, OTHER_MODEL, 5.0)


def unloaded() -> Problem:
    return Problem(404, "The model was unloaded.", "model", "model_not_found")


def late() -> Problem:
    message = "Given up: the deadline passed."
    return Problem(408, message, "deadline_s", "deadline_exceeded")


def draining() -> Problem:
    return Problem(503, "The server is shutting down.", None, "shutting_down", 5.0)
