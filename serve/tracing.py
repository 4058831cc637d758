"""One OpenTelemetry trace for each request, from the HTTP front to the file.

A picture's stages are noted as they pass and become spans when it is over, so that no worker thread
waits for a collector. Off unless a collector's address is given; OpenTelemetry is not loaded
before. Spans never contain a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

SEND_PERIOD_MS = 1000
NS = 1_000_000_000


@dataclass(frozen=True)
class Stretch:
    """A piece of work between two moments of the worker's clock."""

    name: str
    began_s: float
    ended_s: float
    facts: Mapping[str, str | int] = field(default_factory=dict)


def tracer_to(address: str) -> Tracer | None:
    """Return a tracer, or None without an address. OTEL_… variables set the sampling and more."""
    if not address:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "sdxl"}))
    sender = BatchSpanProcessor(OTLPSpanExporter(address), schedule_delay_millis=SEND_PERIOD_MS)
    provider.add_span_processor(sender)
    return provider.get_tracer(__name__)


def begin(tracer: Tracer, name: str, headers: Mapping[str, str]) -> Span:
    """Begin a request's span, inside the client's trace if it names one."""
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(headers)
    return tracer.start_span(name, context, kind=SpanKind.SERVER)


def carried(span: Span) -> str:
    """Return the span as text for another process; empty if it is not recorded."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier["traceparent"]


def record(
    tracer: Tracer,
    parent: str,
    request_id: str,
    whole: Stretch,
    parts: Iterable[Stretch],
    clock: Callable[[], float],
) -> None:
    """Record a span for the whole and one below it for each part; times are from `clock`."""
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    epoch_s = time.time() - clock()

    def span(stretch: Stretch, context: Context) -> Span:
        found = tracer.start_span(
            stretch.name,
            context,
            attributes={"request_id": request_id, **stretch.facts},
            start_time=int((epoch_s + stretch.began_s) * NS),
        )
        found.end(int((epoch_s + stretch.ended_s) * NS))
        return found

    above = TraceContextTextMapPropagator().extract({"traceparent": parent})
    below = set_span_in_context(span(whole, above))
    for part in parts:
        span(part, below)
