"""ASGI middleware that gives every request an id, an answer, metrics and a log line.

An exception reaches the client only as a Problem. It knows no routes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import errors
from serve.errors import Problem
from serve.front.metrics import FrontMetrics
from serve.logs import FIELDS

log = logging.getLogger(__name__)

LIVE, READY = "/v1/health/live", "/v1/health/ready"
ALIVE = ("/healthz", LIVE)
"""Paths that are answered even while the service shuts down."""
PROBES = (*ALIVE, "/readyz", READY, "/metrics")
"""Paths without a log line, as they are requested about every second."""
WORDS = (
    *("prompt", "negative_prompt", "messages", "text", "suffix"),
    *("hr_prompt", "hr_negative_prompt", "styles", "infotext", "firstpass_image", "init_images"),
)
"""Fields with private text that a refusal may quote; the log gets only the error's code."""
MAX_REASON = 300
REFUSED = "refused"
"""Key of a refusal's reason in a request's state. Keeping the exception itself would keep its
frames, and with them the request's data."""
REQUEST_ID = b"x-request-id"
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass
class Front:
    """One front end: its metrics, its open requests, and whether it accepts more."""

    metrics: FrontMetrics = field(default_factory=FrontMetrics)
    open_requests: int = 0
    is_draining: bool = False
    is_signed: bool = True
    """whether to add the request's id to answers; Ray's proxy adds it itself"""

    async def metrics_of_all(self) -> Sequence[Any]:
        """Return the metrics of all front ends; here, of this one."""
        return self.metrics.collect()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; return when the last answer is sent."""
        self.is_draining = True
        clock = asyncio.get_running_loop().time
        until_s = clock() + timeout_s
        while self.open_requests and clock() < until_s:
            await asyncio.sleep(0.02)


class ErrorEnvelope:
    def __init__(self, app: ASGIApp, front: Front) -> None:
        self.app, self.front = app, front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        id_ = request_id(scope)
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = id_
        began, status = time.perf_counter(), 0

        async def sign(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.front.is_signed:
                    signed = [*message["headers"], (REQUEST_ID, id_.encode())]
                    message = {**message, "headers": signed}
            await send(message)

        self.front.open_requests += 1
        try:
            if self.front.is_draining and scope["path"] not in ALIVE:
                raise errors.draining()
            await self.app(scope, receive, sign)
        except Exception as error:
            if not isinstance(error, Problem):
                log.exception("%s failed", id_)
            if status:
                # The answer has begun and can only be cut off.
                raise
            # Do not keep the error in a local variable, as its frames include this one.
            await refusal(state, error)(scope, receive, sign)
        finally:
            self.front.open_requests -= 1
            seconds = time.perf_counter() - began
            self.front.metrics.answered(scope, status, seconds)
            log_request(scope, status, seconds)


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """Log one line, with the reason of a refusal."""
    if scope["path"] in PROBES:
        return
    state = scope["state"]
    facts: dict[str, Any] = {
        "request_id": state["request_id"],
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(seconds, 3),
        "key": state.get("key_name", "-"),
    }
    reason = state.get(REFUSED, "")
    if reason:
        facts["reason"] = reason
    path, quoted = json.dumps(facts["path"]), f" {json.dumps(reason)}" if reason else ""
    log.info(
        "%s %s %s %d %.3fs %s%s",
        *(facts["request_id"], facts["method"], path, status, seconds, facts["key"], quoted),
        extra={FIELDS: facts},
    )


def refusal(state: MutableMapping[str, Any], error: Exception) -> Response:
    """Return an error's answer, and keep its reason for the log."""
    problem = error if isinstance(error, Problem) else errors.unexpected()
    state[REFUSED] = reason_of(problem)
    return response(problem)


def reason_of(problem: Problem) -> str:
    if problem.param in WORDS:
        return f"{problem.param}: {problem.code}"
    return problem.message[:MAX_REASON]


def response(problem: Problem) -> Response:
    # ASCII, since a message may quote invalid Unicode.
    text = json.dumps(problem.body())
    return Response(text, problem.status, problem.headers(), "application/json")


def request_id(scope: Scope) -> str:
    """Return the client's id if it is harmless, or a new one."""
    given = dict(scope["headers"]).get(REQUEST_ID, b"").decode("latin-1")
    return given if ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
