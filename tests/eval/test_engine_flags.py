"""What measures takes the engines that whoever serves may take: of a folder, checked or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

import engines
from sdxl.params import InvalidParams

FLAGS = ("--engines", "styled", "--unchecked")
ASKED = {"folder": "styled", "takes_unchecked": True}


class Loaded(Exception):
    """Engines would be loaded now, as they were asked for."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        super().__init__(str(asked))
        self.asked = asked


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(*_: object, **asked: Any) -> NoReturn:
        raise Loaded(asked)

    monkeypatch.setattr(engines, "load", load)
    monkeypatch.chdir(tmp_path)


def main_of(command: str) -> Any:
    """The function itself: `sdxl.cli` makes a line of an error."""
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
def test_it_asks_for_the_engines_that_its_flags_name(command: str) -> None:
    with pytest.raises(Loaded) as loaded:
        main_of(command)([*COMMANDS[command], *FLAGS])
    assert {name: loaded.value.asked[name] for name in ASKED} == ASKED
    with pytest.raises(Loaded) as loaded:
        main_of(command)([*COMMANDS[command], "--out", "another"])
    assert {name: loaded.value.asked[name] for name in ASKED} == {
        "folder": "",
        "takes_unchecked": False,
    }


def test_a_service_that_loadgen_starts_is_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_service_that_runs_has_its_own(flags: Sequence[str]) -> None:
    with pytest.raises(InvalidParams, match=f"^{flags[0][2:]}: .*a service that has its own"):
        main_of("mlperf")(["--url", "http://nowhere", *flags])


def test_one_folder_is_not_several_precisions() -> None:
    with pytest.raises(InvalidParams, match="engines: 'styled' .*needed one --precision"):
        main_of("tune")(["--precision", "fp32", "int8", *FLAGS])
