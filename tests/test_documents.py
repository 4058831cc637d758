"""Every Markdown document: its links lead somewhere, its commands are bash, its flags exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.documents import (
    ROOT,
    broken_links,
    calls_of_sdxl,
    commands,
    missing_files,
    shell_commands,
    unknown_flags,
)

DOCUMENTS = [
    *sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]),
    ROOT / "examples" / "README.md",
]
NOT_RUN = {
    "operations.md": {"docker", "kubectl"},
    "deploy.md": {
        *("docker", "hf", "make", "openssl", "pip", "sdxl", "sed", "serve", "until"),
        *("serve/deploy/start_node.sh", "SDXL_MODELS=$PWD/models"),
    },
}
"""Programs of `sh` blocks, in pages whose other blocks are run."""

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)


@each_document
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    assert broken_links(document) == []


@each_document
def test_every_file_that_it_names_exists(document: Path) -> None:
    assert missing_files(document) == []


@each_document
def test_every_command_is_bash_and_has_only_flags_that_exist(document: Path) -> None:
    lines = [*commands(document), *shell_commands(document)]
    for line in lines:
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    for call in calls_of_sdxl(lines):
        assert unknown_flags(call) == [], call


def test_architecture_lists_every_package_and_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `([\w/]+)` \|", text, re.M)
    found = {path.parent for depth in ("*", "*/*") for path in ROOT.glob(f"{depth}/__init__.py")}
    names = {str(folder.relative_to(ROOT)) for folder in found}
    packages = {name for name in names if not name.startswith("tests")}
    assert sorted(listed) == sorted(packages | {"serve/web"})


@pytest.mark.parametrize("name", NOT_RUN)
def test_a_block_that_is_not_run_needs_more_than_a_plain_machine(name: str) -> None:
    document = ROOT / "docs" / name
    assert set(re.findall(r"^```(\w+)$", document.read_text(), re.M)) == {"console", "sh"}
    assert {line.split()[0] for line in shell_commands(document)} == NOT_RUN[name]
