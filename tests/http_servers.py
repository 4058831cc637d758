"""Start silent HTTP servers for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(
    handler: Callable[..., Any], port: int = 0, kind: type[HTTPServer] = ThreadingHTTPServer
) -> Iterator[str]:
    """Yield the server's address."""
    with kind(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
