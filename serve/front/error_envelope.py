"""Around every request, as ASGI middleware: an id, an answer whatever happens, a count, a log line.

Nothing that the code below it raises reaches the client but as a Problem. It knows no routes.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import errors
from serve.errors import Problem
from serve.front.probes import LIVE, READY
from serve.front.state import Front
from serve.logs import FIELDS

log = logging.getLogger(__name__)

ALIVE = ("/healthz", LIVE)
"""answered to the very end"""
PROBES = (*ALIVE, "/readyz", READY, "/metrics")
"""Asked every second or so: a line for each would hide the others."""
WORDS = (
    *("prompt", "negative_prompt", "messages", "text", "suffix"),
    *("hr_prompt", "hr_negative_prompt", "styles", "infotext", "firstpass_image", "init_images"),
)
"""What a refusal may quote that is a person's own; of these the log has no more than the code."""
MAX_REASON = 300
REFUSED = "refused"
"""Under which a request's state holds the reason of its refusal: in words, for a raised error holds
all frames that it came through, and with them what the client had sent."""
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


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
                    signed = [*message["headers"], (b"x-request-id", id_.encode())]
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
                # The answer has begun: it can only be broken off.
                raise
            # No variable here holds it longer: its frames are this one, too.
            await refusal(state, error)(scope, receive, sign)
        finally:
            self.front.open_requests -= 1
            seconds = time.perf_counter() - began
            self.front.metrics.answered(scope, status, seconds)
            note(scope, status, seconds)


def note(scope: Scope, status: int, seconds: float) -> None:
    """A line for a request, with the reason of a refusal."""
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
    path, said = json.dumps(facts["path"]), f" {json.dumps(reason)}" if reason else ""
    log.info(
        "%s %s %s %d %.3fs %s%s",
        *(facts["request_id"], facts["method"], path, status, seconds, facts["key"], said),
        extra={FIELDS: facts},
    )


def refusal(state: MutableMapping[str, Any], error: Exception) -> Response:
    problem = error if isinstance(error, Problem) else errors.unexpected()
    state[REFUSED] = reason_of(problem)
    return response(problem)


def reason_of(problem: Problem) -> str:
    if problem.param in WORDS:
        return f"{problem.param}: {problem.code}"
    return problem.message[:MAX_REASON]


def response(problem: Problem) -> Response:
    # ASCII alone: a message may quote what no encoding can carry.
    text = json.dumps(problem.body())
    return Response(text, problem.status, problem.headers(), "application/json")


def request_id(scope: Scope) -> str:
    """The client's, if it is harmless; else a new one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
