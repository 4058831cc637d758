"""One exchange of arbitrary bytes with an HTTP server. HTTP libraries send only valid ones."""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse, IncompleteRead
from typing import Any

STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})[^\r\n]{0,60}\r\n")


@dataclass(frozen=True)
class Exchange:
    received: bytes
    took_s: float
    error: str = ""
    """why the exchange ended early; empty if the server closed the connection"""

    @property
    def statuses(self) -> list[int]:
        """The status of every answer on the connection."""
        return [int(found) for found in STATUS_LINE.findall(self.received)]

    def first(self) -> tuple[int, HTTPMessage, bytes] | None:
        """Status, headers and body of the first answer, if it is complete."""
        try:
            response = HTTPResponse(_Bytes(self.received))  # type: ignore[arg-type]
            response.begin()
            return response.status, response.msg, response.read()
        except IncompleteRead as cut:
            # An answer to HEAD has the length of the body that it omits.
            return response.status, response.msg, cut.partial
        except (HTTPException, OSError, ValueError):
            return None


class _Bytes:
    """The part of a socket that HTTPResponse uses."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._data)


async def exchange(
    host: str, port: int, parts: Sequence[bytes], timeout_s: float, *, half_closes: bool = False
) -> Exchange:
    """Send the parts one by one, and read until the server closes or `timeout_s` passes."""
    began_s, received, error = time.perf_counter(), bytearray(), ""
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if half_closes:
                writer.write_eof()
            while data := await reader.read(2**16):
                received += data
    except TimeoutError:
        error = "timeout"
    except OSError as broken:
        error = type(broken).__name__
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    return Exchange(bytes(received), time.perf_counter() - began_s, error)
