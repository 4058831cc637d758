"""Measuring commands load the same engines as `sdxl serve`: of a folder, checked or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

import engines
from sdxl.params import InvalidParams

FLAGS = ("--engines", "styled", "--unchecked")
REQUESTED = {"folder": "styled", "takes_unchecked": True}


class Loaded(Exception):
    """Engines would be loaded now, with these arguments."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(str(arguments))
        self.arguments = arguments


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(*_: object, **arguments: Any) -> NoReturn:
        raise Loaded(arguments)

    monkeypatch.setattr(engines, "load", load)
    monkeypatch.chdir(tmp_path)


def main_of(command: str) -> Any:
    """The command's function, because `sdxl.cli` catches errors."""
    from eval.command import main as evaluate
    from eval.mlperf.command import main as run_loadgen
    from eval.tune_command import main as tune

    return {"eval": evaluate, "tune": tune, "mlperf": run_loadgen}[command]


COMMANDS: dict[str, Sequence[str]] = {
    "eval": ("--count", "2"),
    "tune": ("--prompts", "1", "--check-prompts", "2", "--out", "tuning"),
    "mlperf": ("--short",),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_choose_the_engines(command: str) -> None:
    with pytest.raises(Loaded) as loaded:
        main_of(command)([*COMMANDS[command], *FLAGS])
    assert {name: loaded.value.arguments[name] for name in REQUESTED} == REQUESTED
    with pytest.raises(Loaded) as loaded:
        main_of(command)([*COMMANDS[command], "--out", "another"])
    assert {name: loaded.value.arguments[name] for name in REQUESTED} == {
        "folder": "",
        "takes_unchecked": False,
    }


def test_a_service_started_for_loadgen_gets_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[str]] = []

    def local_service(flags: Sequence[str]) -> NoReturn:
        started.append(flags)
        raise Loaded({})

    monkeypatch.setattr("eval.service.client.local_service", local_service)
    with pytest.raises(Loaded):
        main_of("mlperf")(["--short", "--over", "http", *FLAGS])
    from serve.cli import read_settings

    settings = read_settings(list(started[0]))
    assert settings.engines == "styled" and settings.unchecked


@pytest.mark.parametrize("flags", [FLAGS[:2], FLAGS[2:]])
def test_a_running_service_refuses_the_flags(flags: Sequence[str]) -> None:
    with pytest.raises(InvalidParams, match=f"^{flags[0][2:]}: .*a service that has its own"):
        main_of("mlperf")(["--url", "http://nowhere", *flags])


def test_a_folder_of_engines_needs_one_precision() -> None:
    with pytest.raises(InvalidParams, match="engines: 'styled' .*needed one --precision"):
        main_of("tune")(["--precision", "fp32", "int8", *FLAGS])
