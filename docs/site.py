"""Hooks of mkdocs: files outside docs/ that pages link to go into the site, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, config: Any) -> Files:
    texts = [(ROOT / "docs" / each.src_uri).read_text() for each in files.documentation_pages()]
    linked = {name for text in texts for name in OUTSIDE.findall(text)}
    for name in sorted(linked.union(PAGES)):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links start at the site's root, which holds what docs/ and the project's root hold."""
    if page.file.src_uri in PAGES:
        return markdown.replace("](docs/", "](")
    return markdown.replace("](../", "](")
