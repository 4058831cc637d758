"""A test that lacks a program or package skips and names it; in CI it fails."""

from __future__ import annotations

import re
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
@pytest.mark.parametrize(("is_ci", "outcome"), [("", pytest.skip.Exception), ("1", AssertionError)])
def test_a_test_that_lacks_it_skips_and_fails_in_ci(
    case: str, is_ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, message = MISSING[case]
    monkeypatch.setenv(REQUIRED, is_ci)
    with pytest.raises(outcome, match=re.escape(message)):
        call()
