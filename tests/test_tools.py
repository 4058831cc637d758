"""A test that lacks a program or package skips and names it; in CI it fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tools import REQUIRED, install, tool

MISSING: dict[str, tuple[Callable[[], object], str]] = {
    "program": (lambda: tool("no-such-program", "nothing"), "Debian's package nothing"),
    "package": (
        lambda: install(["sh", "-c", "echo no route >&2; exit 1"], ["a==1"]),
        "a==1 could not be installed; is there a network? no route",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_test_that_lacks_it_skips(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, message = MISSING[case]
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=message.replace("?", r"\?")):
        call()


@pytest.mark.parametrize("case", MISSING)
def test_in_ci_it_fails(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, message = MISSING[case]
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(AssertionError, match=message.replace("?", r"\?")):
        call()
