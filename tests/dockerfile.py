"""The Dockerfile as data: its instructions in order, continuation lines joined, comments gone."""

from __future__ import annotations

import json
import re
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
    rest = found[first + 1 :]
    ends = [place for place, (word, _) in enumerate(rest) if word == "FROM"]
    return rest[: ends[0]] if ends else rest


def environment() -> dict[str, str]:
    """Return the variables of the image, which is the last stage."""
    (text,) = (rest for name, rest in stage("service") if name == "ENV")
    return dict(pair.split("=", 1) for pair in text.split())


def health_check() -> list[str]:
    (text,) = arguments("HEALTHCHECK")
    command: list[str] = json.loads(text.partition("CMD ")[2])
    return command


def default_command() -> list[str]:
    """Return the image's command, the program first."""
    (program,), (rest,) = arguments("ENTRYPOINT"), arguments("CMD")
    command: list[str] = [*json.loads(program), *json.loads(rest)]
    return command
