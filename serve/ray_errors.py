"""The cause of a replica's failure, from Ray's text of it. It knows no Ray."""

from __future__ import annotations

import re
from collections.abc import Sequence

ERROR = re.compile(r"(?P<module>(?:\w+\.)*)(?P<name>[A-Z]\w*): (?P<text>(?!Traceback).+)")
"""The last line of a traceback."""


def last_error(lines: Sequence[str]) -> str:
    found = [match for line in lines if (match := ERROR.fullmatch(line))]
    if not found:
        return ""
    is_ours = found[-1]["module"].startswith(("sdxl.", "engines.", "serve.", "onnx_export."))
    return found[-1]["text"] if is_ours else f"{found[-1]['name']}: {found[-1]['text']}"
