"""Operators' queries: health, version, licence, and the service's log lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import sdxl
from serve import logs
from tests.serve.servers import GENERATE, file_of_keys, listening
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with listening() as (url, _), httpx.Client(base_url=url, timeout=30) as found:
        yield found


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Collect the service's log lines, as JSON."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logs.JsonLines())
    log = logging.getLogger("serve")
    monkeypatch.setattr(log, "handlers", [handler])
    before = log.level
    log.setLevel(logging.INFO)
    yield text
    log.setLevel(before)


def facts(lines: io.StringIO) -> list[dict[str, object]]:
    """Return a request's log lines; they are written after its answer."""
    wait_until(lambda: lines.getvalue().endswith("\n"))
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_health_has_the_paths_of_other_services(http: httpx.Client) -> None:
    for name, status in (("live", "live"), ("ready", "ready")):
        answer = http.get(f"/v1/health/{name}")
        assert (answer.status_code, answer.json()["status"]) == (200, status)
        assert answer.json()["object"] == "health.response"


def test_version_metadata_and_licence_are_served(http: httpx.Client) -> None:
    assert http.get("/v1/version").json()["release"] == sdxl.__version__
    metadata = http.get("/v1/metadata").json()
    assert metadata["modelInfo"][0]["shortName"] == "sdxl-mini"
    licence = http.get("/v1/license").json()
    assert licence["name"] == "Apache-2.0" and "Apache License" in licence["content"]
    assert licence["size"] == len(licence["content"].encode())


def test_probes_need_no_key_and_the_rest_does(tmp_path: Path) -> None:
    with listening(keys=file_of_keys(tmp_path, secret="me")) as (url, _):
        codes = [
            httpx.get(f"{url}/v1/{name}").status_code
            for name in ("health/live", "health/ready", "version", "metadata")
        ]
    assert codes == [200, 200, 401, 401]


def test_probes_are_not_logged_and_requests_are(http: httpx.Client, lines: io.StringIO) -> None:
    for path in ("/healthz", "/readyz", "/v1/health/live", "/v1/health/ready", "/metrics"):
        assert http.get(path).status_code == 200
    http.get("/v1/models")
    assert [line["path"] for line in facts(lines)] == ["/v1/models"]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"prompt": "x", "size": "100x100"}, 400, "size must be 'auto', or WIDTHxHEIGHT"),
        ({"prompt": "x", "colour": "red"}, 400, "colour is not a field here; leave it out"),
        ({"prompt": "x", "model": "dall-e-9"}, 404, "The model 'dall-e-9' does not exist"),
        ({"prompt": "secret words " * 400}, 400, "prompt: invalid_value"),
    ],
)
def test_a_refusals_reason_is_in_its_line(
    http: httpx.Client, lines: io.StringIO, body: dict[str, str], status: int, reason: str
) -> None:
    assert http.post(GENERATE, json=body).status_code == status
    (line,) = facts(lines)
    assert line["status"] == status and str(line["reason"]).startswith(reason)
    assert "secret" not in lines.getvalue()


def test_a_json_line_is_one_line(lines: io.StringIO) -> None:
    logging.getLogger("serve.test").warning("two\nlines of %s", "\u2028 text")
    (line,) = facts(lines)
    assert line["message"] == "two\nlines of \u2028 text" and line["level"] == "WARNING"
