"""Captions: from the benchmark's TSV, or of drawn scenes."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from sdxl.params import InvalidParams

COLUMN = "caption"
PROMPT_SEED = 2026
"""of the captions' scenes; the reference statistics use another seed"""


def read_captions(path: Path) -> list[str]:
    """The `caption` column of a tab-separated file with a header, in the file's order."""
    needed = f"must be a tab-separated file whose first line names a column {COLUMN!r}"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t", quotechar='"')
            if COLUMN not in (rows.fieldnames or ()):
                columns = ", ".join(rows.fieldnames or ()) or "nothing"
                raise InvalidParams("captions", str(path), f"{needed}; found {columns[:200]}")
            captions = [(row[COLUMN] or "").strip() for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        cause = getattr(error, "strerror", None) or error
        raise InvalidParams("captions", str(path), f"{needed} ({cause})") from error
    empty = next((i for i, caption in enumerate(captions) if not caption), None)
    if empty is not None or not captions:
        line = "has no captions" if empty is None else f"line {empty + 2} has no caption"
        raise InvalidParams("captions", str(path), f"must have a caption on every line; {line}")
    return captions


def scene_captions(count: int) -> list[str]:
    """Captions of scenes that the embedded model did not see in training."""
    import numpy as np

    from sdxl.mini.scenes import caption, sample_scene

    rng = np.random.default_rng(PROMPT_SEED)
    return [caption(sample_scene(rng, held_out=True)) for _ in range(count)]


def escape_brackets(caption: str) -> str:
    """Escape the brackets of a caption, which would set weights in a prompt, and BREAK, which would
    end a chunk; case is nothing to CLIP."""
    return re.sub(r"([\\()\[\]])", r"\\\1", caption).replace("BREAK", "break")


def digest_captions(captions: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(captions).encode()).hexdigest()[:16]
