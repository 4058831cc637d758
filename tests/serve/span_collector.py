"""A collector of traces: an HTTP server that accepts OTLP and keeps the spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.http_servers import Quiet, serving
from tests.waiting import wait_until


@dataclass
class Collector:
    """The spans received, in order of arrival."""

    address: str = ""
    spans: list[Span] = field(default_factory=list)

    def wait_for(self, trace: str, names: Sequence[str]) -> list[Span]:
        """Wait for spans of all these names; return the spans of the trace."""

        def of_trace() -> list[Span]:
            return [span for span in list(self.spans) if span.trace_id.hex() == trace]

        wait_until(lambda: {span.name for span in of_trace()} >= set(names), details=of_trace)
        return of_trace()

    def add(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans


def attributes_of(span: Span) -> dict[str, str]:
    return {
        each.key: each.value.string_value or str(each.value.int_value) for each in span.attributes
    }


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
