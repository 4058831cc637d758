"""Measuring commands load the same engines as `sdxl serve`, from a folder, checked or unchecked."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

import engines
from serve.cli import read_settings

FLAGS = ("--engines", "styled", "--unchecked")
REQUESTED = {"folder": "styled", "takes_unchecked": True}


class Loaded(Exception):
    """Raised in place of loading engines; its argument is theirs."""


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(*_: object, **arguments: Any) -> NoReturn:
        raise Loaded(arguments)

    monkeypatch.setattr(engines, "load", load)
    monkeypatch.chdir(tmp_path)


COMMANDS = {
    "eval": ("eval.command", ("--count", "2")),
    "tune": ("eval.tune_command", ("--prompts", "1", "--check-prompts", "2", "--out", "tuning")),
    "mlperf": ("eval.mlperf.command", ("--short",)),
}


def run(command: str, *flags: str) -> None:
    """Call the command directly, because `sdxl.cli` would catch the error."""
    module, usual = COMMANDS[command]
    import_module(module).main([*usual, *flags])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_choose_the_engines(command: str) -> None:
    usual = {"folder": "", "takes_unchecked": False}
    for flags, expected in ((FLAGS, REQUESTED), (("--out", "another"), usual)):
        with pytest.raises(Loaded) as loaded:
            run(command, *flags)
        assert {name: loaded.value.args[0][name] for name in expected} == expected


def test_a_service_started_for_loadgen_gets_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    def local_service(flags: Sequence[str]) -> NoReturn:
        raise Loaded(flags)

    monkeypatch.setattr("eval.service.client.local_service", local_service)
    with pytest.raises(Loaded) as started:
        run("mlperf", "--over", "http", *FLAGS)
    settings = read_settings(started.value.args[0])
    assert settings.engines == "styled" and settings.unchecked
