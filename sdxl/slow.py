"""Logs slow work while it runs, so that it does not look like a hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

PATIENCE_S = 10.0


@contextmanager
def log_if_slow(work: str) -> Iterator[None]:
    """Log the work's name if the block takes longer than PATIENCE_S, and again at the end."""
    began_s = time.monotonic()
    timer = threading.Timer(PATIENCE_S, log.info, [f"{work} …"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if (took_s := time.monotonic() - began_s) > PATIENCE_S:
        log.info("%s took %.0f s", work, took_s)
