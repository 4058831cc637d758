"""Measuring commands load the same engines as `sdxl serve`, from a folder, checked or unchecked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

import engines
from sdxl.params import InvalidParams

FLAGS = ("--engines", "styled", "--unchecked")
REQUESTED = {"folder": "styled", "takes_unchecked": True}


class Loaded(Exception):
    """Raised in place of loading engines, with the arguments."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(str(arguments))
        self.arguments = arguments


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
        assert {name: loaded.value.arguments[name] for name in expected} == expected


def test_a_service_started_for_loadgen_gets_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[str]] = []

    def local_service(flags: Sequence[str]) -> NoReturn:
        started.append(flags)
        raise Loaded({})

    monkeypatch.setattr("eval.service.client.local_service", local_service)
    with pytest.raises(Loaded):
        run("mlperf", "--over", "http", *FLAGS)
    from serve.cli import read_settings

    settings = read_settings(list(started[0]))
    assert settings.engines == "styled" and settings.unchecked


@pytest.mark.parametrize("flags", [FLAGS[:2], FLAGS[2:]])
def test_a_running_service_refuses_the_flags(flags: Sequence[str]) -> None:
    with pytest.raises(InvalidParams, match=f"^{flags[0][2:]} cannot be used with --url"):
        run("mlperf", "--url", "http://nowhere", *flags)


def test_a_folder_of_engines_needs_one_precision() -> None:
    with pytest.raises(InvalidParams, match="engines needs one --precision, the folder's"):
        run("tune", "--precision", "fp32", "int8", *FLAGS)
