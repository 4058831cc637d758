"""CHANGELOG.md: Unreleased is above the releases, and the newest release is the current version."""

from __future__ import annotations

import re
from datetime import date

import sdxl
from tests.documents import ROOT

TITLES = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
"""as Keep a Changelog names them"""


def releases() -> list[tuple[tuple[int, ...], date]]:
    pairs = (title.split(" - ") for title in TITLES[1:])
    return [(tuple(map(int, v.split("."))), date.fromisoformat(day)) for v, day in pairs]


def test_unreleased_changes_are_first_and_releases_follow_the_newest_first() -> None:
    assert TITLES[0] == "Unreleased"
    assert releases() == sorted(releases(), reverse=True)
    assert len({version for version, _ in releases()}) == len(releases())


def test_the_newest_release_is_the_version_here() -> None:
    version, _ = releases()[0]
    assert ".".join(map(str, version)) == sdxl.__version__


def test_changes_are_of_the_usual_kinds() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= KINDS
