"""docs/operations.md: every command that a plain machine can run is run; the others are named."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.isolation import run_alone

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "operations.md"
ELSEWHERE = {"docker", "kubectl"}
"""Programs that need more than a plain machine."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)


def commands() -> list[str]:
    lines = (line for block in blocks("console") for line in block.splitlines())
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def told() -> Iterator[str]:
    """Lines that the document says are printed."""
    for block in blocks("console"):
        yield from (line for line in block.splitlines() if not line.startswith("$ "))


def test_every_command_is_bash() -> None:
    for command in commands():
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_what_is_not_run_needs_another_machine() -> None:
    programs = {line.split()[0] for block in blocks("sh") for line in block.splitlines()}
    assert programs == ELSEWHERE


def test_every_block_is_one_or_the_other() -> None:
    kinds = re.findall(r"^```(\w+)$", DOCUMENT.read_text(), re.M)
    assert set(kinds) == {"console", "sh"}


def test_files_it_links_to_are_there() -> None:
    text = DOCUMENT.read_text()
    headings = {title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        else:
            assert (DOCUMENT.parent / target).exists(), target


def test_every_alert_is_explained() -> None:
    rules = yaml.safe_load((ROOT / "serve/deploy/alerts.yml").read_text())["groups"][0]["rules"]
    explained = set(re.findall(r"^\| (Sdxl\w+) \|", DOCUMENT.read_text(), re.M))
    assert explained == {rule["alert"] for rule in rules}


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_command_works_and_says_what_the_document_says(tmp_path: Path) -> None:
    for name in ("serve", "eval", "sdxl", "engines", "onnx_export"):
        (tmp_path / name).symlink_to(ROOT / name)
    # A busy machine may take longer to finish what is in flight than operators would wait.
    script = "\n".join(["set -x", "export SDXL_SHUTDOWN_S=200", *commands()])
    done = run_alone(script, tmp_path, 2300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    said = done.stdout + done.stderr
    missing = [line for line in told() if line not in said]
    assert not missing, f"not printed: {missing}\n{done.stdout[-3000:]}"
