"""The code around Ray's proxy, on a fake proxy: its own answers, lost requests, small bodies."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from serve.front import proxied
from serve.front.proxied import CARRIED, Proxied

App = Callable[[Scope, Receive, Send], Awaitable[None]]
LEFT: Message = {"type": "http.disconnect"}


def part(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def said_by(app: App, received: Iterable[Message | float] = (), size: int = 0) -> list[Message]:
    """Return what the client gets; a number in the fake proxy's messages is a pause in seconds."""
    coming, sent = list(received), list[Message]()

    async def receive() -> Message:
        while coming and isinstance(coming[0], float):
            await asyncio.sleep(coming[0])
            coming.pop(0)
        if not coming:
            await asyncio.Event().wait()
        message = coming.pop(0)
        assert not isinstance(message, float)
        return message

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-length", str(size).encode())] if size else []
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    asyncio.run(Proxied(app)(scope, receive, send))
    return sent


def speaker(status: int, kind: bytes, body: bytes, is_whole: bool = True) -> App:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": not is_whole})

    return app


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    """Ray's proxy does this if an answer is larger than its processes can exchange."""


async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
    assert await receive() == LEFT


def envelope(sent: list[Message]) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(sent[1]["body"])["error"]
    assert b"x-request-id" in dict(sent[0]["headers"])
    return error | {"status": sent[0]["status"]}


def test_a_proxy_that_has_no_routes_yet_is_no_404() -> None:
    """Clients ask again after a 503, and give up at a 404."""
    start, _ = sent = said_by(speaker(404, b"text/plain", b"Path '/v1/models' not found."))
    error = envelope(sent)
    assert (error["status"], error["code"]) == (503, "starting")
    assert dict(start["headers"])[b"retry-after"] == b"1"


@pytest.mark.parametrize("status", [408, 500, 503])
def test_ray_s_own_errors_get_the_envelope(status: int) -> None:
    error = envelope(said_by(speaker(status, b"text/plain", b"Deployment is unavailable")))
    assert error["status"] == status and set(error) > {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("status", "kind"), [(400, b"application/json"), (200, b"text/plain"), (304, b"text/plain")]
)
def test_other_answers_pass_as_they_are(status: int, kind: bytes) -> None:
    start, body = said_by(speaker(status, kind, b"{}"))
    assert start["status"] == status and body["body"] == b"{}"


def test_a_lost_answer_is_a_500_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert envelope(said_by(silent))["status"] == 500 and "was lost" in caplog.text


def test_a_broken_answer_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    said_by(speaker(200, b"text/plain", b"half", is_whole=False))
    assert "the rest of the answer was lost" in caplog.text


def test_a_client_that_left_lost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert said_by(waiting, [LEFT]) == [] and not caplog.text


def heard(received: list[Message | float], size: int) -> tuple[bytes | None, list[Message]]:
    """Return the body that came with the scope, and the messages that were received afterwards."""
    carried, rest = [], list[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        carried.append(scope.get("extensions", {}).get(CARRIED))
        while (message := await receive()) != LEFT:
            rest.append(message)

    said_by(app, [*received, LEFT], size)
    return carried[0], rest


def test_a_small_body_comes_with_its_request() -> None:
    assert heard([part(b"ab", True), part(b"c")], 3) == (b"abc", [])


def test_a_slow_body_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxied, "CARRY_S", 0.01)
    parts = [part(b"ab", True), part(b"c")]
    assert heard([parts[0], 0.1, parts[1]], 3) == (None, parts)


@pytest.mark.parametrize("size", [0, 64 * 1024 + 1, 10**30])
def test_a_large_or_unsized_body_is_read_by_ray(size: int) -> None:
    assert heard([part(b"abc")], size) == (None, [part(b"abc")])


def test_a_client_that_leaves_within_its_body_is_seen_to_leave() -> None:
    assert heard([part(b"ab", True)], 3) == (None, [part(b"ab", True)])
