"""Runs in Ray's proxy: retries a request whose front end dies, or hangs while another one answers.

A request is retried only before its answer begins; all requests may run twice. It knows no routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import Problem
from serve.fleet import liveness
from serve.fleet.beats import SILENCE_S
from serve.fleet.liveness import Liveness
from serve.front.error_envelope import REQUEST_ID, request_id, response
from serve.front.trimming import Trimming

log = logging.getLogger(__name__)

FRONT = "ImageIngress"
"""The deployment's name."""
LOOK_S, LEAVE_S, PAUSE_S = 0.5, 1.0, 0.1
PATIENCE_S = 30.0
"""How long a request is retried while front ends die."""
MAX_KEPT = 64 << 20
"""The most bytes of a body that are kept; a request with a longer body is not retried."""
DISCONNECT: Message = {"type": "http.disconnect"}


class Handover:
    def __init__(self, app: ASGIApp, fronts: Liveness | None = None) -> None:
        self.app = app
        self._fronts = fronts or liveness.of_deployment(FRONT)
        self.trimming = Trimming()
        self._open = Counter[str]()
        """open requests by id; several may share one"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = Body(receive)
        try:
            await self._try_fronts(body, scope, send)
        finally:
            # Ray's frames may keep the request in a cycle long after its end.
            body.kept.clear()
            self.trimming.schedule(body.size)

    async def _try_fronts(self, body: Body, scope: Scope, send: Send) -> None:
        until_s = time.monotonic() + PATIENCE_S
        name = request_id(scope)
        others = [(key, value) for key, value in scope["headers"] if key != REQUEST_ID]
        scope["headers"] = [*others, (REQUEST_ID, name.encode("latin-1"))]
        while True:
            attempt = Attempt(body, send)
            self._open[name] += 1
            try:
                await self._attempt(scope, name, attempt)
            finally:
                self._close(name)
            if attempt.has_begun or body.is_over or not body.is_kept:
                return
            if time.monotonic() > until_s:
                problem = Problem(503, "No front end could answer.", None, "unavailable", 5.0)
                await response(problem)(scope, attempt.receive, send)
                return
            log.warning("%s: the front end was lost; the request is retried", name)
            await asyncio.sleep(PAUSE_S)

    def _close(self, name: str) -> None:
        self._open[name] -= 1
        if not self._open[name]:
            del self._open[name]
            self._fronts.forget(name)

    async def _attempt(self, scope: Scope, name: str, attempt: Attempt) -> None:
        """Return when the front end has answered, is gone, or hangs."""
        began_s = time.monotonic()
        call = asyncio.ensure_future(self.app(scope, attempt.receive, attempt.send))
        try:
            while not (await asyncio.wait({call}, timeout=LOOK_S))[0]:
                if attempt.may_be_left and self._hangs(name, began_s):
                    attempt.leave()
                    await asyncio.wait({call}, timeout=LEAVE_S)
                    return
            call.result()
        finally:
            call.cancel()

    def _hangs(self, name: str, began_s: float) -> bool:
        """Return whether this front end hangs and another one does not."""
        if not self._fronts.has_any:
            return False
        front = self._fronts.holder(name)
        if front is None:
            # A working front end accepts a request at once.
            return time.monotonic() - began_s > SILENCE_S and self._fronts.has_silent
        return self._fronts.silent_s(front) > SILENCE_S


class Body:
    """The client's messages, kept while a retry may need them."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._lock = asyncio.Lock()
        self.kept: list[Message] = []
        self.size = 0
        self.is_over = False
        """whether the client has disconnected"""

    @property
    def is_kept(self) -> bool:
        return self.size <= MAX_KEPT

    async def message(self, number: int) -> Message:
        if self.is_kept and number < len(self.kept):
            return self.kept[number]
        async with self._lock:
            message = await self._receive()
        self.is_over = self.is_over or message["type"] == "http.disconnect"
        self.size += len(message.get("body", b""))
        if self.is_kept:
            self.kept.append(message)
        else:
            self.kept = []
        return message


class Attempt:
    """One front end's view of the request, and its answer."""

    def __init__(self, body: Body, send: Send) -> None:
        self._body, self._send = body, send
        self._read = 0
        self._is_left = asyncio.Event()
        self.has_begun = False

    @property
    def may_be_left(self) -> bool:
        return self._body.is_kept and not (self.has_begun or self._body.is_over)

    def leave(self) -> None:
        """Send this front end a disconnect."""
        self._is_left.set()

    async def receive(self) -> Message:
        news = asyncio.ensure_future(self._body.message(self._read))
        left = asyncio.ensure_future(self._is_left.wait())
        try:
            await asyncio.wait({news, left}, return_when=asyncio.FIRST_COMPLETED)
            if self._is_left.is_set():
                return DISCONNECT
            self._read += 1
            return news.result()
        finally:
            news.cancel()
            left.cancel()

    async def send(self, message: Message) -> None:
        if not self._is_left.is_set():
            self.has_begun = True
            await self._send(message)
