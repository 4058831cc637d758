"""Read the commands and links of a Markdown document.

A `console` block runs on any machine. An `sh` block needs a GPU, Docker or a network.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path

from sdxl.cli import main

ROOT = Path(__file__).parents[1]


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.M | re.S)


def commands(document: Path) -> list[str]:
    """Return the typed lines, which begin with a dollar. The others are output."""
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


def unknown_flags(call: Sequence[str]) -> list[str]:
    has_part = call[0] in ("bench", "eval", "tune") and len(call) > 1 and call[1].isalnum()
    known = re.findall(r"--[a-z0-9-]+", help_text(*call[: 1 + has_part]))
    return [flag for flag in call if flag.startswith("--") and flag.split("=")[0] not in known]


@cache
def help_text(*command: str) -> str:
    with redirect_stdout(StringIO()) as printed, suppress(SystemExit):
        main([*command, "--help-all"])
    return printed.getvalue()


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


def missing_files(document: Path) -> list[str]:
    """Return the files and modules that the document names and this repository lacks."""
    text = document.read_text()
    rooms = "(?:sdxl|engines|onnx_export|serve|eval|tests)"
    files = re.findall(rf"`({rooms}/[\w./-]+)", text)
    modules = re.findall(rf"python -m ({rooms}[\w.]+\w)", text)
    names = [*files, *(module.replace(".", "/") for module in modules)]
    return [
        name for name in names if not any((ROOT / f"{name}{end}").exists() for end in ("", ".py"))
    ]
