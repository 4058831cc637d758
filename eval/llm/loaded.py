"""Whether a service's language model has loaded, at every replica, and what its log says if not.

A service whose language model fails is ready all the same: it serves pictures without it.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx

from eval.service.scraping import values_of

START_S = 900.0
"""for the replicas after the first"""
AGAIN_S = 1.0
REPLICA = "sdxl_llm_running"
"""a series of each replica that has loaded"""
FAILED = "the language model does not load"
"""what a replica logs before the traceback"""
SPEAKER = re.compile(r"^\([^)]*\) ")
"""which process says a line, in Ray's words"""


class NotLoaded(RuntimeError):
    """A language model that a service does without: why."""


def wait_until_loaded(url: str, replicas: int, log: Path, start_s: float = START_S) -> None:
    """Until each replica answers. Raises NotLoaded with the first reason that the log holds."""
    until_s = time.monotonic() + start_s
    while (loaded := replicas_of(url)) < replicas:
        reason = failure_in(log.read_text(encoding="utf-8", errors="replace"))
        if reason or is_unavailable(url) or time.monotonic() > until_s:
            raise NotLoaded(f"{loaded} of {replicas} replicas load: {reason or 'no reason given'}")
        time.sleep(AGAIN_S)


def replicas_of(url: str) -> int:
    return len(values_of(httpx.get(f"{url}/metrics", timeout=30).text, REPLICA))


def is_unavailable(url: str) -> bool:
    return bool(httpx.get(f"{url}/readyz", timeout=30).json().get("llm") == "unavailable")


def failure_in(log: str) -> str:
    """The exception below the first traceback of a replica that did not load."""
    lines = (SPEAKER.sub("", line) for line in log.splitlines())
    has_failed = False
    for line in lines:
        if has_failed and line and not line.startswith((" ", "Traceback")):
            return line
        has_failed = has_failed or FAILED in line
    return ""
