"""One request's trace, drawn: three overlapping requests to `sdxl serve`, the second one's spans.

python -m eval.service.trace [--out docs/trace.svg]

It starts the service with a collector of its own, a few lines that speak OTLP over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from eval.service.load import GENERATE, PROMPT
from eval.service.local_service import local_service
from sdxl.files import write_atomic

FLAGS = ["--llm", "none", "--trace-to"]
APART_S = 0.05
WAIT_S = 30.0
NAMES_WIDTH, WIDTH, ROW, BAR, MARGIN = 130, 900, 20, 13, 16
COLORS = {
    "request": "#64748b",
    "image": "#94a3b8",
    "encode": "#0d9488",
    "queue": "#d97706",
    "denoise": "#c7d2fe",
    "unet_deep": "#4f46e5",
    "unet_shallow": "#a5b4fc",
    "decode": "#db2777",
    "file": "#f472b6",
}
"""of each kind of span, in the order of their rows"""


@dataclass(frozen=True)
class Span:
    name: str
    trace: str
    id: str
    parent: str
    began_s: float
    ended_s: float
    facts: dict[str, str]


@dataclass
class Collector:
    """What it was sent, in order of arrival."""

    address: str = ""
    spans: list[Span] = field(default_factory=list)

    def wait_for(self, trace: str, names: Sequence[str]) -> list[Span]:
        """The spans of one trace, once all of these have come."""
        until = time.monotonic() + WAIT_S
        while True:
            found = [span for span in list(self.spans) if span.trace == trace]
            if {span.name for span in found} >= set(names):
                return sorted(found, key=lambda span: span.began_s)
            if time.monotonic() > until:
                raise TimeoutError(f"only {sorted({s.name for s in found})} after {WAIT_S} s")
            time.sleep(0.05)

    def take(self, body: bytes) -> None:
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
                            fact.key: fact.value.string_value or str(fact.value.int_value)
                            for fact in span.attributes
                        },
                    )
                    for span in scope.spans
                ]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.address = f"http://127.0.0.1:{server.server_port}/v1/traces"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()


async def ask_three(url: str) -> None:
    """The second one's trace id is the client's own."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:

        async def ask(number: int) -> None:
            await asyncio.sleep(number * APART_S)
            headers = {"traceparent": f"00-{trace_id(number)}-{'1' * 16}-01"}
            body = {"prompt": PROMPT, "seed": number, "deadline_s": 100}
            (await http.post(GENERATE, json=body, headers=headers)).raise_for_status()

        await ask(0)
        await asyncio.gather(*(ask(number) for number in (1, 2, 3)))


def trace_id(number: int) -> str:
    return f"{number + 1:032x}"


def draw(spans: Sequence[Span]) -> str:
    """An SVG: a row a kind of span, time to the right, every engine call a bar."""
    began = min(span.began_s for span in spans)
    total = max(span.ended_s for span in spans) - began
    rows = [name for name in COLORS if any(span.name == name for span in spans)]
    scale = (WIDTH - NAMES_WIDTH - 2 * MARGIN) / total
    height = 2 * MARGIN + (len(rows) + 2) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    parts += axis(total, scale, MARGIN + len(rows) * ROW)
    for number, name in enumerate(rows):
        top = MARGIN + number * ROW
        mine = [span for span in spans if span.name == name]
        count = f" × {len(mine)}" if len(mine) > 1 else ""
        parts.append(f'<text x="{MARGIN}" y="{top + 11}" fill="#334155">{name}{count}</text>')
        for span in mine:
            left = MARGIN + NAMES_WIDTH + (span.began_s - began) * scale
            width = max((span.ended_s - span.began_s) * scale, 1.0)
            told = ", ".join(f"{key} {value}" for key, value in sorted(span.facts.items()))
            milliseconds = 1000 * (span.ended_s - span.began_s)
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2" '
                f'fill="{COLORS[name]}" stroke="#ffffff" stroke-width="0.5">'
                f"<title>{name}: {milliseconds:.1f} ms; {escape(told)}</title></rect>"
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def axis(total: float, scale: float, top: int) -> list[str]:
    step = next(
        s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 60.0) if total / s <= 10
    )
    parts = []
    for number in range(int(total / step) + 1):
        x = MARGIN + NAMES_WIDTH + number * step * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{MARGIN}" x2="{x:.1f}" y2="{top + 4}" stroke="#e2e8f0"/>'
        )
        label = f"{1000 * number * step:.0f} ms"
        parts.append(
            f'<text x="{x:.1f}" y="{top + 18}" text-anchor="middle" fill="#64748b">{label}</text>'
        )
    return parts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.service.trace", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/trace.svg"))
    options = parser.parse_args(argv)
    with collecting() as collector, local_service([*FLAGS, collector.address]) as url:
        asyncio.run(ask_three(url))
        spans = collector.wait_for(trace_id(2), [*COLORS])
    write_atomic(options.out, draw(spans).encode())
    print(f"{options.out}: {len(spans)} spans of request {spans[0].facts['request_id']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
