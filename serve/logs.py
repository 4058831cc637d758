"""The service's own log lines, from every process, on stderr; Ray brings them together."""

from __future__ import annotations

import logging
import sys

PACKAGES = ("serve", "engines", "sdxl")


def configure() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for package in PACKAGES:
        log = logging.getLogger(package)
        log.handlers, log.propagate = [handler], False
        log.setLevel(logging.INFO)
