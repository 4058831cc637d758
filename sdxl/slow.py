"""What lasts long is named while it lasts, so that nobody takes it for a hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

PATIENCE_S = 10.0


@contextmanager
def named_if_slow(what: str) -> Iterator[None]:
    """`what` is going on inside: said once it has gone on for PATIENCE_S, and again at its end."""
    began_s = time.monotonic()
    timer = threading.Timer(PATIENCE_S, log.info, [f"{what} …"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if (took_s := time.monotonic() - began_s) > PATIENCE_S:
        log.info("%s took %.0f s", what, took_s)
