"""Writes pictures into JSON as base64, with a single copy.

The JSON text has an empty string for each picture and is split there, so that pydantic does not
check and escape megabytes of base64. It knows no routes.
"""

from __future__ import annotations

import asyncio
import re
from binascii import b2a_base64
from collections.abc import Iterator, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SMALL_BYTES = 256 * 1024
"""An answer up to this size is sent as one message, which costs more than a copy."""
EMPTY = re.compile(rb'("b64_json": ?)""')
"""Matches no other part of a JSON text: inside strings, quotes have a backslash."""


def filled(text: bytes, files: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the parts of the text with the files filled in."""
    head, *rest = EMPTY.split(text)
    yield head
    for file, field, tail in zip(files, rest[::2], rest[1::2], strict=True):
        yield b'%s"%s"%s' % (field, b2a_base64(file, newline=False), tail)


class PicturesResponse(Response):
    """Sends a large answer part by part, so that no second copy of the whole exists."""

    def __init__(self, text: bytes, files: Sequence[bytes]) -> None:
        self.text, self.files = text, files
        length = len(text) + sum(4 * ((len(file) + 2) // 3) for file in files)
        self.is_small = length <= SMALL_BYTES
        super().__init__(headers={"content-length": str(length)}, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        if self.is_small:
            body = b"".join(filled(self.text, self.files))
            await send({"type": "http.response.body", "body": body, "more_body": False})
            return
        for part in filled(self.text, self.files):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            # Let other requests run, and the server send this part before the next is encoded.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
