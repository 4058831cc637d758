"""The Dockerfile as data: its instructions in order, continuation lines joined, comments gone."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    found = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(name, rest) for name, rest in found]


def arguments(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def stage(name: str) -> list[tuple[str, str]]:
    """The instructions of one stage, without those of earlier stages."""
    found = instructions()
    first = found.index(next(x for x in found if x[0] == "FROM" and x[1].endswith(f" AS {name}")))
    return list(takewhile(lambda each: each[0] != "FROM", found[first + 1 :]))
