"""ASGI middleware that limits a request's body, and cancels the answer when the client leaves.

The body is read whole, within limits, before it is parsed. Then the answer is cancelled as soon as
the client disconnects. All bodies share one budget until their answers end, since a parsed body is
no smaller. It knows no routes.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import Problem, invalid
from serve.front.proxied import CARRIED
from serve.front.trimming import Trimming
from serve.settings import ServeSettings

STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Matches at every quote, also in an unclosed string, so that nothing is scanned twice."""
FORM = "multipart/form-data"
BRACKET = re.compile(rb"[\[\]{}]")
KEY_SHARE = 0.5
"""The most of the budget for one API key."""
RETRY_S = 5.0


class BodyBudget:
    """Counts the bytes of request bodies that this process holds."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self.by_key = Counter[str]()

    def take(self, size: int, key: str) -> None:
        """Add bytes, or raise Problem 503. `key` is "" without API keys."""
        is_over = key and self.by_key[key] + size > KEY_SHARE * self.most
        if is_over or self.held + size > self.most:
            owner = "the key's" if is_over else "all"
            message = f"Too many bytes of {owner} requests are held; send this one again later."
            raise Problem(503, message, None, "bodies_full", RETRY_S)
        self.held += size
        self.by_key[key] += size

    def give_back(self, size: int, key: str) -> None:
        self.held -= size
        self.by_key[key] -= size
        if not self.by_key[key]:
            del self.by_key[key]


@dataclass
class HeldBody:
    """One request's part of the budget."""

    budget: BodyBudget
    key: str
    size: int = 0

    def grow_to(self, size: int) -> None:
        if size > self.size:
            self.budget.take(size - self.size, self.key)
            self.size = size

    def release(self) -> None:
        self.budget.give_back(self.size, self.key)


class BodyLimit:
    def __init__(
        self, app: ASGIApp, settings: ServeSettings, larger: Mapping[str, tuple[int, float]]
    ) -> None:
        """`larger`: limits in bytes and seconds for paths whose bodies contain files."""
        self.app, self.settings, self.larger = app, settings, larger
        self.budget, self.trimming = BodyBudget(settings.bodies_bytes), Trimming()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        key = scope.get("state", {}).get("key")
        held = HeldBody(self.budget, key.digest if key else "")
        try:
            # In a list, from which it is removed when it is read, as an answer may take long.
            body = [await self._read(scope, receive, held)]
            if body[0] is not None:
                await self._answer(scope, body, receive, send)
        finally:
            held.release()
            self.trimming.schedule(held.size)

    async def _read(self, scope: Scope, receive: Receive, held: HeldBody) -> bytes | None:
        """Return the body; None if the client left before its end."""
        usual = self.settings.max_body_bytes, self.settings.body_timeout_s
        most, within_s = self.larger.get(scope["path"], usual)
        carried: bytes | None = scope.get("extensions", {}).get(CARRIED)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        size = int(declared.lstrip(b"0")[:20] or b"0") if declared.isdigit() else most + 1
        if size > most:
            raise too_large(most)
        try:
            async with asyncio.timeout(within_s):
                # A body that came with its request is not charged: refusing it would free nothing.
                body = carried if carried is not None else await _collect(receive, most, size, held)
        except TimeoutError:
            raise Problem(408, "The body did not arrive in time.", None, "body_timeout") from None
        if body is not None and not is_form(Headers(scope=scope)):
            check_json(body, self.settings.max_json_depth)
        return body

    async def _answer(
        self, scope: Scope, body: list[bytes | None], receive: Receive, send: Send
    ) -> None:
        is_gone = asyncio.Event()

        async def replay() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await is_gone.wait()
            return {"type": "http.disconnect"}

        app = asyncio.ensure_future(self.app(scope, replay, send))
        watch = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({app, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_gone.set()
            watch.cancel()
            if not app.done():
                app.cancel()
            results = await asyncio.gather(app, watch, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]


async def _collect(receive: Receive, most: int, declared: int, held: HeldBody) -> bytes | None:
    chunks, total = [], 0
    held.grow_to(declared)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        total += len(chunk)
        if total > most:
            raise too_large(most)
        held.grow_to(total)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def too_large(most: int) -> Problem:
    return Problem(413, f"The body is too large; at most {most} bytes.", None, "body_too_large")


def is_form(headers: Headers) -> bool:
    return headers.get("content-type", "").lower().startswith(FORM)


def check_json(body: bytes, most: int) -> None:
    """Raise Problem for JSON that nests deeper than `most`, or that is not UTF-8."""
    # Python's parser also reads UTF-16 and UTF-32, whose depth is not counted; each has zeros.
    if b"\0" in body:
        raise invalid(None, "The body must be JSON in UTF-8.")
    if depth(body) > most:
        raise invalid(None, f"The body nests too deep; at most {most} levels.", "too_deep")


def depth(body: bytes) -> int:
    """Return how deep brackets nest outside of strings, in linear time without parsing."""
    level = deepest = 0
    for bracket in BRACKET.findall(STRING.sub(b"", body)):
        level += 1 if bracket in b"[{" else -1
        deepest = max(deepest, level)
    return deepest
