"""What a test lacks is said: a skip, and in CI a failure."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tools import REQUIRED, install, tool

LACKING: dict[str, tuple[Callable[[], object], str]] = {
    "program": (lambda: tool("no-such-program", "nothing"), "Debian's package nothing"),
    "package": (
        lambda: install(["sh", "-c", "echo no route >&2; exit 1"], ["a==1"]),
        "a==1 could not be installed; is there a network? no route",
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_a_test_without_it_skips(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, said = LACKING[case]
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match=said.replace("?", r"\?")):
        call()


@pytest.mark.parametrize("case", LACKING)
def test_in_ci_it_fails(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, said = LACKING[case]
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(AssertionError, match=said.replace("?", r"\?")):
        call()
