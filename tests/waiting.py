"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    check: Callable[[], T],
    timeout_s: float = 50.0,
    pause_s: float = 0.02,
    details: Callable[[], object] = str,
) -> T:
    """Return the first result of `check` that is true. A failure's message ends with `details`."""
    until_s = time.monotonic() + timeout_s
    while not (result := check()):
        assert time.monotonic() < until_s, f"not after {timeout_s:g} s: {details()}"
        time.sleep(pause_s)
    return result
