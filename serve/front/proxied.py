"""ASGI middleware in the process of Ray's HTTP proxy: it puts the proxy's errors into our envelope,
and logs answers that the proxy lost, for which the front end has already logged a 200.

It sends a small body along with its request, which saves the front end a second call. It knows no
routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import errors
from serve.errors import Problem
from serve.front.error_envelope import request_id, response

log = logging.getLogger(__name__)

CARRIED = "sdxl.body"
"""Name of the ASGI extension with the body."""
SMALL_BYTES = 64 * 1024
CARRY_S = 0.05
"""The longest wait for a body; the front end fetches one that arrives later."""


class Proxied:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_gone = has_begun = is_replaced = is_over = False
        early = await carry(scope, receive)

        async def receive_message() -> Message:
            nonlocal is_gone
            message = early.pop(0) if early else await receive()
            is_gone = is_gone or message["type"] == "http.disconnect"
            return message

        async def send_message(message: Message) -> None:
            nonlocal has_begun, is_replaced, is_over
            if message["type"] == "http.response.start":
                has_begun, is_replaced = True, is_plain_error(message)
                if is_replaced:
                    await signed(problem_of(message["status"]), scope)(scope, receive, send)
            else:
                is_over = not message.get("more_body", False)
            if not is_replaced:
                await send(message)

        await self.app(scope, receive_message, send_message)
        if is_over or is_gone:
            return
        name = request_id(scope)
        if has_begun:
            log.error("%s: the rest of the answer was lost behind Ray's proxy", name)
        else:
            log.error("%s: the answer was lost behind Ray's proxy; the client got a 500", name)
            await signed(errors.unexpected(), scope)(scope, receive, send)


def problem_of(status: int) -> Problem:
    """Return our error for one of the proxy. A 404 means that the proxy has just started and does
    not know the application yet, which has routes for all paths."""
    if status == 404:
        return Problem(503, "The service is starting.", None, "starting", 1.0)
    return errors.of_status(status)


def signed(problem: Problem, scope: Scope) -> Response:
    """Return the error's answer with the request's id, from the client or from Ray."""
    answer = response(problem)
    answer.headers["x-request-id"] = request_id(scope)
    return answer


async def carry(scope: Scope, receive: Receive) -> list[Message]:
    """Put a small body into the scope. Return the messages received of another body."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    early: list[Message] = []
    if not declared.isdigit() or len(declared) > 5 or not 0 < int(declared) <= SMALL_BYTES:
        return early
    with suppress(TimeoutError):
        async with asyncio.timeout(CARRY_S):
            while True:
                early.append(await receive())
                if not early[-1].get("more_body", False):
                    break
    if early and early[-1]["type"] == "http.request" and not early[-1].get("more_body", False):
        body = b"".join(message["body"] for message in early)
        scope.setdefault("extensions", {})[CARRIED] = body
        return []
    return early


def is_plain_error(start: Mapping[str, Any]) -> bool:
    """Return whether this is an error of Ray: all of ours are JSON."""
    kinds = [value for name, value in start["headers"] if bytes(name).lower() == b"content-type"]
    return start["status"] >= 400 and not any(b"json" in bytes(kind) for kind in kinds)
