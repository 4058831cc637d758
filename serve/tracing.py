"""One OpenTelemetry trace for each request, from the HTTP front to the file.

A picture's stages become spans only after its end, so that no worker thread waits for a collector.
Tracing is off, and OpenTelemetry is not loaded, unless a collector's address is given. Spans never
contain a prompt.
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
class TimedPart:
    """A piece of work; times are from the worker's clock."""

    name: str
    began_s: float
    ended_s: float
    facts: Mapping[str, str | int] = field(default_factory=dict)


def tracer_to(address: str) -> Tracer | None:
    """Return a tracer, or None without an address. OTEL_… variables configure it, such as its
    sampling."""
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


def record(
    tracer: Tracer,
    parent: str,
    request_id: str,
    whole: TimedPart,
    parts: Iterable[TimedPart],
    clock: Callable[[], float],
) -> None:
    """Record a span for `whole`, and a child span for each part; times are from `clock`."""
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    epoch_s = time.time() - clock()

    def record_span(part: TimedPart, context: Context) -> Span:
        span = tracer.start_span(
            part.name,
            context,
            attributes={"request_id": request_id, **part.facts},
            start_time=int((epoch_s + part.began_s) * NS),
        )
        span.end(int((epoch_s + part.ended_s) * NS))
        return span

    request_context = TraceContextTextMapPropagator().extract({"traceparent": parent})
    whole_context = set_span_in_context(record_span(whole, request_context))
    for part in parts:
        record_span(part, whole_context)
