"""A tracing span around every POST request, as ASGI middleware. It knows no routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import tracing
from serve.errors import Problem

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class RequestTracing:
    """Must be inside ErrorEnvelope, which gives the request its id."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app, self.tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        span = tracing.begin(self.tracer, "request", headers)
        span.set_attributes(
            {"request_id": scope["state"]["request_id"], "path": scope["path"][:200]}
        )
        scope["state"]["trace"] = tracing.traceparent(span)

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("status", message["status"])
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        except Problem as problem:
            span.set_attribute("status", problem.status)
            raise
        finally:
            span.end()
