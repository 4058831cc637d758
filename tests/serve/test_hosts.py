"""The service's host names: requests from another site's page in a browser are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.worker.worker import Worker
from tests.serve.servers import GENERATE, call, error_of, file_of_keys

ASKED = {"prompt": "a", "steps": 2}


def ask(
    worker: Worker, method: str, path: str, headers: dict[str, str], **settings: Any
) -> httpx.Response:
    body = ASKED if method == "POST" else None
    return call(worker, method, path, settings, headers=headers, json=body)


OURS = ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "a.localhost")
FOREIGN = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example")


@pytest.mark.parametrize("host", OURS)
def test_this_machine_s_names_and_any_address_are_served(worker: Worker, host: str) -> None:
    assert ask(worker, "GET", "/v1/models", {"host": host}).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("GET", "/metrics"), ("POST", GENERATE)]
)
def test_another_name_is_refused(worker: Worker, host: str, method: str, path: str) -> None:
    answer = ask(worker, method, path, {"host": host})
    assert answer.status_code == 403 and error_of(answer)["code"] == "host_not_allowed"


FOREIGN_PAGES = (
    *("https://evil.example", "http://evil.example:8000", "null"),
    *("http://203.0.113.5", "https://203.0.113.5:8000", "http://[2001:db8::5]"),
)


@pytest.mark.parametrize("origin", FOREIGN_PAGES)
def test_another_site_s_page_cannot_order_pictures(worker: Worker, origin: str) -> None:
    """The page could send text/plain, which browsers send without a preflight request."""
    answer = ask(worker, "POST", GENERATE, {"origin": origin, "content-type": "text/plain"})
    assert answer.status_code == 403 and error_of(answer)["code"] == "host_not_allowed"


@pytest.mark.parametrize("origin", ["http://localhost:8000", "http://127.0.0.1:8000"])
def test_our_own_page_orders_pictures(worker: Worker, origin: str) -> None:
    assert ask(worker, "POST", GENERATE, {"origin": origin}).status_code == 200


@pytest.mark.parametrize("address", ["10.1.2.3:8000", "[fd00::1]:8000"])
def test_the_page_orders_pictures_at_its_own_address(worker: Worker, address: str) -> None:
    headers = {"host": address, "origin": f"http://{address}"}
    assert ask(worker, "POST", GENERATE, headers).status_code == 200
    headers["origin"] = "http://203.0.113.5"
    assert ask(worker, "POST", GENERATE, headers).status_code == 403


NAMED = ({"hosts": "other, Pictures.example"}, {"hosts": "*"})


@pytest.mark.parametrize("named", [*NAMED, {"public_url": "https://pictures.example/sdxl"}])
def test_names_that_an_operator_gives_are_served(worker: Worker, named: dict[str, str]) -> None:
    headers = {"host": "pictures.example", "origin": "https://pictures.example"}
    assert ask(worker, "POST", GENERATE, headers, **named).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_answers_under_any_host_name(worker: Worker, path: str) -> None:
    assert ask(worker, "GET", path, {"host": "sdxl.namespace.svc"}).status_code == 200


def test_a_service_with_keys_accepts_any_host_name(worker: Worker, tmp_path: Path) -> None:
    keys, host = file_of_keys(tmp_path, k="me"), {"host": "pictures.example"}
    assert ask(worker, "GET", "/v1/models", host, keys=keys).status_code == 401
    with_key = {**host, "authorization": "Bearer k"}
    assert ask(worker, "GET", "/v1/models", with_key, keys=keys).status_code == 200
