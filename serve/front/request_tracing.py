"""A tracing span around every POST request, as ASGI middleware. It knows no routes."""

from __future__ import annotations

from opentelemetry.trace import SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import Problem


class RequestTracing:
    """Must be inside ErrorEnvelope, which gives the request its id."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app, self.tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        propagator, carrier = TraceContextTextMapPropagator(), dict[str, str]()
        facts = {"request_id": scope["state"]["request_id"], "path": scope["path"][:200]}
        # Inside the client's trace, if the headers name one.
        context = propagator.extract(Headers(scope=scope))
        span = self.tracer.start_span("request", context, SpanKind.SERVER, attributes=facts)
        if span.is_recording():
            propagator.inject(carrier, set_span_in_context(span))
        scope["state"]["trace"] = carrier.get("traceparent", "")

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("status", message["status"])
            await send(message)

        try:
            await self.app(scope, receive, note_status)
        except Problem as problem:
            span.set_attribute("status", problem.status)
            raise
        except Exception:
            span.set_attribute("status", 500)
            raise
        finally:
            span.end()
