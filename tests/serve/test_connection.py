"""The limits of a connection, on a real server with the protocol class of Ray's proxy."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from serve.front import connection
from tests.serve.servers import listening_to
from tests.serve.services import RAY_TRUSTS, ROOT

MIB = 1 << 20
CLOSED_S = 20.0


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the received headers."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    seen = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    body = json.dumps({**seen, "size": size}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def deaf(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before it reads the body."""
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": b"no"})


@contextmanager
def listening(app: Any = echo) -> Iterator[int]:
    with listening_to(app, log_level="critical", http=connection.BoundedProtocol) as url:
        yield int(url.rpartition(":")[2])


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with listening() as found:
        yield found


def connected(port: int) -> closing[socket.socket]:
    return closing(socket.create_connection(("127.0.0.1", port), timeout=CLOSED_S))


def answer_to(port: int, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Return the status and body of the answer to raw bytes; the server ends the connection."""
    with connected(port) as raw:
        for part in parts:
            try:
                raw.sendall(part)
            except OSError:
                break
        text = read_all(raw)
    head, _, body = text.partition(b"\r\n\r\n")
    assert b"x-request-id: req_" in head and b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


def read_all(raw: socket.socket) -> bytes:
    chunks = []
    while chunk := raw.recv(65536):
        chunks.append(chunk)
    return b"".join(chunks)


HEAD = b"GET / HTTP/1.1\r\nhost: a\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"
ENDLESS = {
    "one header": [HEAD + b"x: ", b"a" * MIB],
    "a header's name": [HEAD, b"x" * MIB],
    "many headers": [HEAD, b"x: a\r\n" * 10_000],
    "the request line": [b"GET /", b"a" * MIB],
    "empty lines": [b"\r\n" * MIB],
    "a header that comes whole": [HEAD + b"x: " + b"a" * 40_000 + b"\r\n\r\n"],
    "headers that come whole": [HEAD + b"x: a\r\n" * 101 + b"\r\n"],
}


@pytest.mark.parametrize("parts", ENDLESS.values(), ids=ENDLESS)
def test_the_size_of_a_requests_head_is_bounded(port: int, parts: list[bytes]) -> None:
    status, error = answer_to(port, *parts)
    assert (status, error["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "endless", [b"0\r\nx: " + b"a" * MIB, b"1;" + b"a" * MIB, b"zz\r\n", b"-1\r\na\r\n"]
)
def test_trailers_and_chunk_extensions_are_bounded(port: int, endless: bytes) -> None:
    """An unfinished request gets no answer."""
    with connected(port) as raw:
        raw.sendall(CHUNKED)
        with pytest.raises(OSError):
            for _ in range(64):
                raw.sendall(endless)
            raw.recv(1)
            raise ConnectionResetError("closed in order")


NO_HTTP = {
    "TLS": b"\x16\x03\x01 hello\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "zeros": b"\0" * 1000,
    "no name of a header": HEAD + b": a\r\n\r\n",
    "a zero in a name": HEAD + b"a\0b: c\r\n\r\n",
    "a negative length": HEAD + b"content-length: -1\r\n\r\n",
    "a length beyond 64 bits": HEAD + b"content-length: 99999999999999999999\r\n\r\n",
    "a tunnel": b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
    "two lengths": HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
}


@pytest.mark.parametrize("raw", NO_HTTP.values(), ids=NO_HTTP)
def test_bytes_that_are_no_http_get_the_envelope(port: int, raw: bytes) -> None:
    status, error = answer_to(port, raw)
    assert status == 400 and set(error) == {"message", "type", "param", "code"}


def test_an_ordinary_request_passes(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for _ in range(3):
            seen = http.post("/a", content=bytes(200_000), headers={"x-a": "b" * 8000}).json()
            assert seen["size"] == 200_000 and len(seen["x-a"]) == 8000


OFFER = b"upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAM\r\n"


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize(
    "body",
    [b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"],
)
@pytest.mark.parametrize("size", [1, 20, 1000])
def test_an_offer_of_another_protocol_changes_nothing(
    port: int, protocol: bytes, body: bytes, size: int
) -> None:
    """Neither for the request nor for the next one, however the bytes arrive."""
    post = b"POST /a?b HTTP/1.1\r\nhost: a\r\n" + OFFER.replace(b"h2c", protocol) + body
    sent = post + post + HEAD + b"connection: close\r\n\r\n"
    with connected(port) as raw:
        for at in range(0, len(sent), size):
            raw.sendall(sent[at : at + size])
        text = read_all(raw)
    assert text.count(b"HTTP/1.1 200") == 3 and text.count(b'"size": 3}') == 2
    assert b'"upgrade"' not in text and b'"http2-settings": "AAM"' in text


def test_very_many_offers_at_once_are_answered(port: int) -> None:
    sent = (HEAD + OFFER + b"\r\n") * 2000 + HEAD + b"connection: close\r\n\r\n"
    with connected(port) as raw:
        threading.Thread(target=raw.sendall, args=(sent,)).start()
        assert read_all(raw).count(b"HTTP/1.1 200") == 2001


def test_headers_that_ray_trusts_do_not_pass(port: int) -> None:
    trusted = RAY_TRUSTS | {"x-request-id": "<b>"}
    url = f"http://127.0.0.1:{port}"
    seen = httpx.get(url, headers={**trusted, "authorization": "Bearer k"}).json()
    assert not set(trusted) & set(seen) and seen["authorization"] == "Bearer k"
    assert httpx.get(url, headers={"x-request-id": "req_1"}).json()["x-request-id"] == "req_1"


def test_a_trailer_is_no_header(port: int) -> None:
    raw = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    with connected(port) as client:
        client.sendall(raw + b"1\r\na\r\n0\r\nx-late: a\r\n\r\n")
        assert b"x-late" not in read_all(client)


def test_the_limits_of_headers_are_the_documented_ones() -> None:
    limits = f"{connection.MAX_HEAD_BYTES >> 10} KiB, {connection.MAX_HEADERS} of them, "
    text = " ".join((ROOT / "docs" / "operations.md").read_text().split())
    assert f"headers ({limits}{connection.HEAD_TIMEOUT_S:g} s)" in text


def test_slow_headers_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    with listening() as port:
        status, error = answer_to(port, HEAD, b"x: a")
        assert (status, error["code"]) == (408, "header_timeout")


@pytest.mark.parametrize("drip", [b"\r\n", b""])
def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch, drip: bytes) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    with listening() as port, connected(port) as raw:
        raw.sendall(drip)
        assert read_all(raw) == b""


def test_a_body_that_drips_on_after_its_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    with listening(deaf) as port, connected(port) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n")
        until_s = time.monotonic() + CLOSED_S
        with pytest.raises(OSError):
            while time.monotonic() < until_s:
                raw.sendall(b"a")
                time.sleep(0.05)
