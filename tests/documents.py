"""A Markdown document's commands: `console` blocks are for any machine, `sh` blocks need more."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from sdxl.cli import COMMANDS

ROOT = Path(__file__).parents[1]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.M | re.S)


def commands(document: Path) -> list[str]:
    """What is typed; lines that do not begin with a dollar are printed."""
    return re.findall(r"^\$ (.*)$", "".join(blocks(document, "console")), re.M)


def check_bash(lines: Iterable[str]) -> None:
    for line in lines:
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


def calls_of_sdxl(lines: Iterable[str]) -> Iterator[list[str]]:
    """The arguments of each, in a container or not, up to whatever the shell makes of the rest."""
    for line in lines:
        found = re.search(r"(?:^|docker run .*? )sdxl (?P<rest>[^>&|<#]*)", line)
        if found:
            yield shlex.split(found["rest"])


def check_flags(calls: Iterable[list[str]]) -> set[str]:
    """Each is one that its command has. The commands whose flags were read."""
    read = set()
    for command, *flags in calls:
        module, _, _ = COMMANDS[command][0].partition(":")
        if flags[:1] == ["fetch"]:
            module, flags = "eval.quality.fetch", flags[1:]
        build_parser = getattr(importlib.import_module(module), "build_parser", None)
        if build_parser is not None:
            build_parser().parse_args(flags)
            read.add(command)
    return read


def check_links(document: Path) -> None:
    text = document.read_text()
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    headings = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, heading = target.partition("#")
        if "://" in target:
            continue
        there = (document.parent / file).exists() if file else heading in headings
        assert there, target
