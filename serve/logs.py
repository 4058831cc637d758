"""The service's own log lines, from every process, on stderr; Ray brings them together.

They are text for people, or JSON objects for programs.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

PACKAGES = ("serve", "engines", "sdxl")
TEXT, JSON = FORMATS = ("text", "json")
VARIABLE = "SDXL_LOG_FORMAT"
"""where Ray's proxy, which knows no settings, finds it"""
FIELDS = "fields"
"""What a record holds besides its message, under this name in `extra`: a dict for JSON lines."""


class JsonLines(logging.Formatter):
    """One object a line, ASCII alone: a line feed in a message is no end of a record."""

    def format(self, record: logging.LogRecord) -> str:
        facts = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return json.dumps(facts, default=str)


def configure(format: str = TEXT) -> None:
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if format == JSON else plain)
    for package in PACKAGES:
        log = logging.getLogger(package)
        log.handlers, log.propagate = [handler], False
        log.setLevel(logging.INFO)
