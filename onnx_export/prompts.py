"""The prompts of a calibration: 500 in this package, or the prompts of a file.

A file has a prompt on each line, or tab-separated columns with one named `caption`, as MLPerf's
tools write them, or ids of COCO's captions (MLPerf's list), whose text is in an annotations file.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from sdxl.params import InvalidParams

OWN = Path(__file__).with_name("prompts.txt")
CAPTION = "caption"


def read_prompts(file: Path, annotations: Path | None = None) -> list[str]:
    lines = [line for line in map(str.strip, _text("calibration", file).splitlines()) if line]
    if not lines:
        raise InvalidParams("calibration", str(file), "must have a prompt on each line")
    if all(line.isdigit() for line in lines):
        return _captions(file, lines, annotations)
    if file.suffix == ".tsv":
        return _column(file, lines)
    return lines


def spread(prompts: Sequence[str], count: int) -> list[str]:
    """Return `count` prompts spread over the list, since neighbours may be alike."""
    if not 1 <= count <= len(prompts):
        raise InvalidParams("calibration-count", count, f"must be 1 to {len(prompts)} prompts")
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _column(file: Path, lines: Sequence[str]) -> list[str]:
    rows = csv.DictReader(lines, delimiter="\t")
    if CAPTION not in (rows.fieldnames or ()):
        needed = f"must have a tab-separated column {CAPTION!r}"
        raise InvalidParams("calibration", str(file), needed)
    return [text for row in rows if (text := (row[CAPTION] or "").strip())]


def _captions(file: Path, ids: Sequence[str], annotations: Path | None) -> list[str]:
    if annotations is None:
        needed = "holds ids of COCO captions and needs --annotations captions_train2014.json"
        raise InvalidParams("calibration", str(file), needed)
    try:
        entries = json.loads(_text("annotations", annotations))["annotations"]
        texts = {str(entry["id"]): str(entry["caption"]).strip() for entry in entries}
    except (ValueError, LookupError, TypeError) as error:
        needed = f"must hold COCO's annotations of captions ({type(error).__name__}: {error})"
        raise InvalidParams("annotations", str(annotations), needed) from error
    if missing := [id_ for id_ in ids if id_ not in texts]:
        needed = f"must have the caption {missing[0]}, which {file.name} lists"
        raise InvalidParams("annotations", str(annotations), needed)
    return [texts[id_] for id_ in ids]


def _text(field: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParams(field, str(file), f"must hold UTF-8 text ({error})") from error
