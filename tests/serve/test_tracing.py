"""Traces: every stage of a request is a span; without the setting there are none."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from serve.tracing import tracer_to
from tests.serve.servers import GENERATE, listening
from tests.serve.services import ROOT, free_port
from tests.serve.span_collector import Collector, attributes_of, collecting

TRACE, PARENT = "a" * 32, "b" * 16
STAGES = ("encode", "queue", "denoise", "unet_deep", "unet_shallow", "decode", "file")
BODY = {"prompt": "a secret ring", "steps": 4, "cache_interval": 2, "seed": 3}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def spans(collector: Collector) -> list[Span]:
    """The spans of one request for two images with the client's trace id."""
    tracer = tracer_to(collector.address)
    with listening(tracer=tracer, trace_to=collector.address) as (url, _):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        answer = httpx.post(f"{url}{GENERATE}", json={**BODY, "n": 2}, headers=headers)
        assert answer.status_code == 200, answer.text
        return collector.wait_for(TRACE, ("request", "image", *STAGES))


def test_every_stage_is_a_span_below_its_image_below_its_request(spans: list[Span]) -> None:
    (request,) = (span for span in spans if span.name == "request")
    images = [span for span in spans if span.name == "image"]
    assert request.parent_span_id.hex() == PARENT and len(images) == 2
    assert {span.parent_span_id for span in images} == {request.span_id}
    for image in images:
        names = [span.name for span in spans if span.parent_span_id == image.span_id]
        expected = [*STAGES, "unet_deep", "unet_shallow"]
        assert sorted(names) == sorted(expected), "four steps are two deep and two shallow calls"


def test_every_span_has_the_request_s_id_and_none_its_prompt(spans: list[Span]) -> None:
    assert {attributes_of(span)["request_id"] for span in spans} == {"mine"}
    assert not any("secret" in str(span) for span in spans)


def test_stages_follow_one_another_within_their_image(spans: list[Span]) -> None:
    image = next(span for span in spans if span.name == "image")
    inside = {span.name: span for span in spans if span.parent_span_id == image.span_id}
    order = [inside[name] for name in ("encode", "queue", "denoise", "decode", "file")]
    times = [image.start_time_unix_nano]
    for stage in order:
        times += stage.start_time_unix_nano, stage.end_time_unix_nano
    times.append(image.end_time_unix_nano)
    slack_ns = 10_000
    assert all(before <= after + slack_ns for before, after in itertools.pairwise(times)), times


def test_a_collector_that_is_gone_costs_no_request() -> None:
    address = f"http://127.0.0.1:{free_port()}/v1/traces"
    with listening(tracer=tracer_to(address), trace_to=address) as (url, _):
        assert httpx.post(f"{url}{GENERATE}", json=BODY).status_code == 200


def test_a_refused_request_s_span_says_so(collector: Collector) -> None:
    other = "c" * 32
    with listening(trace_to=collector.address) as (url, _):
        headers = {"traceparent": f"00-{other}-{PARENT}-01"}
        answer = httpx.post(f"{url}{GENERATE}", json={"prompt": 7}, headers=headers)
        (span,) = collector.wait_for(other, ("request",))
    assert attributes_of(span)["status"] == str(answer.status_code) == "400"


@pytest.mark.slow
def test_without_an_address_no_tracing_library_is_loaded() -> None:
    code = (
        "import sys, serve.worker.worker, serve.front.api; "
        "from serve.settings import ServeSettings as S; "
        "from tests.serve.workers import fake_pipeline; "
        "serve.front.api.create_app([serve.worker.worker.Worker(fake_pipeline())], S()); "
        "print(*[name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert not done.stdout.split(), done.stdout
