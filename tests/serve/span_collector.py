"""A collector of traces: an HTTP server that accepts OTLP and keeps the spans."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.http_servers import Quiet, serving

WAIT_S = 30.0


@dataclass(frozen=True)
class Span:
    name: str
    trace: str
    id: str
    parent: str
    began_s: float
    ended_s: float
    attributes: dict[str, str]


@dataclass
class Collector:
    """The spans received, in order of arrival."""

    address: str = ""
    spans: list[Span] = field(default_factory=list)

    def wait_for(self, trace: str, names: Sequence[str]) -> list[Span]:
        """Wait for spans of all these names; return the spans of the trace."""
        until = time.monotonic() + WAIT_S
        while True:
            spans = [span for span in list(self.spans) if span.trace == trace]
            if {span.name for span in spans} >= set(names):
                return sorted(spans, key=lambda span: span.began_s)
            if time.monotonic() > until:
                raise TimeoutError(f"only {sorted({s.name for s in spans})} after {WAIT_S} s")
            time.sleep(0.05)

    def add(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        {
                            each.key: each.value.string_value or str(each.value.int_value)
                            for each in span.attributes
                        },
                    )
                    for span in scope.spans
                ]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(Quiet):
        def do_POST(self) -> None:
            collector.add(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

    with serving(Handler) as url:
        collector.address = f"{url}/v1/traces"
        yield collector
