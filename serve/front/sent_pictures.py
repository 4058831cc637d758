"""Pictures in requests: their data URLs, and the thread that decodes them. It knows no HTTP
server.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from serve.errors import invalid

DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,", re.ASCII)
DATA_URL_ONLY = "must be a data URL (data:image/png;base64,…); other URLs are not fetched"
T = TypeVar("T")


@dataclass
class DecodingThread:
    """Decodes one picture after another, as a large one takes 100 MB. A cancelled request holds the
    thread until its decode finishes; a lock around asyncio's threads would be released before."""

    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "pictures"))

    async def run(self, decode: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, decode)


def file_in(url: str, param: str, name: str = "") -> bytes:
    """Return the file of a data URL, or raise Problem. `name`: its name in the error."""
    name, head = name or param, DATA_URL.match(url)
    if head is None:
        raise invalid(param, f"{name} {DATA_URL_ONLY}, got {url[:40]!r}")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise invalid(param, f"{name} must be valid base64 after data:image/png;base64,") from None
