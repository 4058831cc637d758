"""One request's way in and out, as ASGI middleware: a bounded body, and an end when the client
leaves.

The body is read whole, within limits, before anything parses it. From then on whoever makes the
answer is cancelled as soon as the client is gone. It knows no routes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.errors import Problem, invalid
from serve.front.proxied import CARRIED
from serve.settings import ServeSettings

STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Matches at every quote it meets, closed or not: nothing is scanned twice."""
FORM = b"multipart/form-data"
BRACKET = re.compile(rb"[\[\]{}]")


class BodyLimit:
    def __init__(
        self,
        app: ASGIApp,
        settings: ServeSettings,
        larger: Mapping[str, tuple[int, float]] | None = None,
    ) -> None:
        """`larger`: bytes and seconds of the paths whose bodies hold files."""
        self.app, self.settings, self.larger = app, settings, larger or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # In a list, so that it is let go once it was read: an answer may take long.
        body = [await self._read(scope, receive)]
        if body[0] is not None:
            await self._answer(scope, body, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """None if the client left before it had said everything."""
        usual = self.settings.max_body_bytes, self.settings.body_timeout_s
        most, within_s = self.larger.get(scope["path"], usual)
        carried: bytes | None = scope.get("extensions", {}).get(CARRIED)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > most:
            raise too_large(most)
        try:
            async with asyncio.timeout(within_s):
                body = await _collect(receive, most) if carried is None else carried
        except TimeoutError:
            raise Problem(408, "The body did not arrive in time.", None, "body_timeout") from None
        if body is not None and is_json(scope) and depth(body) > self.settings.max_json_depth:
            most = self.settings.max_json_depth
            raise invalid(None, f"The body nests too deep; at most {most} levels.", "too_deep")
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


async def _collect(receive: Receive, most: int) -> bytes | None:
    chunks, total = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        total += len(chunk)
        if total > most:
            raise too_large(most)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def too_large(most: int) -> Problem:
    return Problem(413, f"The body is too large; at most {most} bytes.", None, "body_too_large")


def is_json(scope: Scope) -> bool:
    """Unless it says that it is a form: who else lies is read as JSON, too."""
    return not dict(scope["headers"]).get(b"content-type", b"").lower().startswith(FORM)


def depth(body: bytes) -> int:
    """How deep brackets nest outside of strings. Linear, and parses nothing."""
    level = deepest = 0
    for bracket in BRACKET.findall(STRING.sub(b"", body)):
        level += 1 if bracket in b"[{" else -1
        deepest = max(deepest, level)
    return deepest
