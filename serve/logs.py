"""Configures the log lines of every process of the service: on stderr, as text or JSON objects.

Ray merges the processes' output.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

PACKAGES = ("serve", "engines", "sdxl")
TEXT, JSON = FORMATS = ("text", "json")
VARIABLE = "SDXL_LOG_FORMAT"
"""Environment variable with the format, for Ray's proxy, which has no settings."""
OF_RAY: dict[str, Any] = {"log_level": "WARNING", "enable_access_log": False}
"""Settings of Ray Serve's own log."""
FIELDS = "fields"
"""Key in a record's `extra`: a dict of further fields for JSON lines."""


class JsonLines(logging.Formatter):
    """Formats each record as one line of ASCII JSON; line feeds in messages are escaped."""

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
