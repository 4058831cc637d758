"""Finds the cause of a replica's failure in Ray's text. It knows no Ray."""

from __future__ import annotations

import re
from collections.abc import Sequence

ERROR = re.compile(r"(?P<module>(?:\w+\.)*)(?P<name>[A-Z]\w*): (?P<text>(?!Traceback).+)")
"""The last line of a traceback."""


def last_error(lines: Sequence[str]) -> str:
    """Return the last error, without its class if it is ours; "" if there is none."""
    errors = [match for line in lines if (match := ERROR.fullmatch(line))]
    if not errors:
        return ""
    error = errors[-1]
    is_ours = error["module"].startswith(("sdxl.", "engines.", "serve.", "onnx_export."))
    return error["text"] if is_ours else f"{error['name']}: {error['text']}"
