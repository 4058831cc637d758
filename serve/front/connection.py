"""Limits a connection to Ray's HTTP proxy: the size of a request's head, and the time to send it.

uvicorn limits neither, and Ray's proxy trusts some headers. Ray calls `bound` in the proxy's
process before it listens. It knows no routes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from http import HTTPStatus
from typing import Any

import httptools
import uvicorn.config
from starlette.middleware import Middleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve import logs
from serve.errors import Problem, invalid
from serve.front.error_envelope import ID, REQUEST_ID
from serve.front.handover import Handover
from serve.front.proxied import Proxied

MAX_HEAD_BYTES = 32 * 1024
"""Limit of the request line and headers together, and of bytes that the parser buffers."""
MAX_HEADERS = 100
HEAD_TIMEOUT_S = 10.0
LINGER_S = 2.0
"""Time before closing, since closing at once may lose the answer just written."""
TRUSTED = re.compile(
    rb"x-request-timeout-seconds|x-request-disconnect-disabled|x-session-id"
    rb"|serve-multiplexed-model-id|x-serve-.*"
)
"""Headers with which a client could turn off timeouts of Ray's proxy or choose a replica."""


def bound() -> list[Middleware]:
    """Install the limits; RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function. Ray lets
    uvicorn choose the protocol class, so this replaces the class in uvicorn's table."""
    logs.configure(os.environ.get(logs.VARIABLE, logs.TEXT))
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedProtocol.__name__}"
    return [Middleware(Handover), Middleware(Proxied)]


class RequestParser(httptools.HttpRequestParser):
    """httptools' parser skips the body after an offer of another protocol, such as h2c, and takes
    it for the next request. Here such a head is parsed again without its offer."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self.protocol = protocol
        # As uvicorn's.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: Any) -> None:
        left = memoryview(data)
        while left:
            try:
                super().feed_data(left)
                return
            except httptools.HttpParserUpgrade as offer:
                left = left[offer.args[0] :]
                super().feed_data(self.protocol.head_without_offer())


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits and our error envelope."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = RequestParser(self)
        self._held = 0
        """bytes since the parser's last callback"""
        self._is_in_head = self._is_refused = False
        self._problem: Problem | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._limit is None and self._is_idle:
            self._wait_for_head()
        self._held += len(data)
        super().data_received(data)
        if self._held > MAX_HEAD_BYTES and not self._is_refused:
            self._refuse(too_large())

    # -- callbacks of the parser ------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers come after the head and are ignored.
        if self._is_in_head and is_passed_on(name.lower(), value):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._held, self._is_in_head = 0, False
        self._stop_waiting()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._problem = too_large()
            raise self._problem
        if not self._is_offer:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_offer:
            super().on_message_complete()

    @property
    def _is_offer(self) -> bool:
        """Whether the head is to be parsed again. CONNECT is refused, as its URL has no path."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_body(self, body: bytes) -> None:
        self._held = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._problem or invalid(None, msg, "invalid_http"))

    # -- timeouts and refusals --------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._limit = self.loop.call_later(HEAD_TIMEOUT_S, self._time_out)

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _time_out(self) -> None:
        if self._is_in_head:
            message = "The headers did not arrive in time."
            self._refuse(Problem(408, message, None, "header_timeout"))
        else:
            self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Answer with the problem and stop reading; during another answer, only close."""
        self._stop_waiting()
        self._is_refused = True
        if not self._is_idle:
            self.transport.close()
            return
        self.transport.write(answer(problem))
        self.transport.write_eof()
        self._limit = self.loop.call_later(LINGER_S, self.transport.close)


def is_passed_on(name: bytes, value: bytes) -> bool:
    if name == REQUEST_ID:
        return ID.fullmatch(value.decode("latin-1")) is not None
    return TRUSTED.fullmatch(name.replace(b"_", b"-")) is None


def too_large() -> Problem:
    most = f"at most {MAX_HEADERS} and {MAX_HEAD_BYTES} bytes"
    return Problem(431, f"The headers are too large; {most}.", None, "headers_too_large")


def answer(problem: Problem) -> bytes:
    """Return the error envelope as an HTTP/1.1 answer."""
    body = json.dumps(problem.body())
    head = [
        f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"{REQUEST_ID.decode()}: req_{secrets.token_hex(12)}",
        "connection: close",
    ]
    return "\r\n".join([*head, "", body]).encode()
