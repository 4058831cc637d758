"""Read the commands and links of a Markdown document.

A `console` block runs on any machine. An `sh` block needs a GPU, Docker or a network.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from sdxl.cli import COMMANDS

ROOT = Path(__file__).parents[1]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.M | re.S)


def commands(document: Path) -> list[str]:
    """Return the typed lines, which begin with a dollar; the others are output."""
    text = "".join(blocks(document, "console")).replace("\\\n", "")
    return re.findall(r"^\$ (.*)$", text, re.M)


def shell_commands(document: Path) -> list[str]:
    return "".join(blocks(document, "sh")).replace("\\\n", "").splitlines()


def calls_of_sdxl(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the arguments of each call, in a container or not, up to a pipe or redirection."""
    for line in lines:
        match = re.search(r"(?:^|docker run .*? )sdxl (?P<rest>[^>&|<#;]*)", line)
        if match:
            yield shlex.split(match["rest"])


def check_flags(calls: Iterable[list[str]]) -> None:
    """Parse every call with its command's parser."""
    for command, *flags in calls:
        module, _, _ = COMMANDS[command][0].partition(":")
        if flags[:1] == ["fetch"]:
            module, flags = "eval.quality.fetch", flags[1:]
        build_parser = getattr(importlib.import_module(module), "build_parser", None)
        if build_parser is not None:
            build_parser().parse_args(flags)


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", document.read_text(), re.M)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(document: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        path = document.parent / file if file else document
        if not path.exists() or (heading and heading not in anchors(path)):
            broken.append(target)
    return broken
