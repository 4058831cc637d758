"""Answers with pictures between processes."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode

import pytest
from starlette.types import Message

from serve.front.pictures import SMALL_BYTES, PicturesResponse

TEXT = b'{"data":[{"b64_json":"","seed":1},{"b64_json":"","seed":2}]}'


def sent(files: list[bytes]) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is to be read")

    asyncio.run(PicturesResponse(TEXT, files)({"type": "http"}, receive, send))
    return messages


@pytest.mark.parametrize(("size", "bodies"), [(1000, 1), (SMALL_BYTES, 4)])
def test_only_a_large_answer_comes_in_parts(size: int, bodies: int) -> None:
    files = [bytes([number]) * size for number in (1, 2)]
    start, *parts = sent(files)
    assert len(parts) == bodies
    assert [part["more_body"] for part in parts] == [True] * (bodies - 1) + [False]
    whole = b"".join(part["body"] for part in parts)
    assert dict(start["headers"])[b"content-length"] == str(len(whole)).encode()
    assert [b64decode(each["b64_json"]) for each in json.loads(whole)["data"]] == files
