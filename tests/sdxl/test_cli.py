"""The command line: every listed command exists; every error is one line and an exit code."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Callable

import httpx
import pytest

from sdxl import __version__, cli
from sdxl.files import OutputError
from sdxl.params import InvalidParams


def raising(error: BaseException) -> Callable[[str], Callable[[list[str]], int]]:
    def run(_: list[str]) -> int:
        raise error

    return lambda name: run


def test_every_listed_command_exists_and_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (target, text) in cli.COMMANDS.items():
        assert importlib.util.find_spec(target.partition(":")[0]), f"{name}: no {target}"
        assert callable(cli.command(name)) and name in shown and text in shown


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sdxl {__version__}\n"


def test_no_command_shows_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("usage: sdxl COMMAND") and "render" in err


@pytest.mark.parametrize("argv", [["paint"], ["--speed"]])
def test_an_unknown_command_names_the_known_ones(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "must be one of render" in err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InvalidParams("steps", 0, "must be more"), 2, "sdxl: steps must be more, got 0"),
        (argparse.ArgumentError(None, "unrecognized: --x"), 2, "sdxl: unrecognized: --x"),
        (FileNotFoundError(2, "No such file", "a.png"), 1, "[Errno 2] No such file: 'a.png'"),
        (
            OutputError("a", OSError(28, "full")),
            1,
            "sdxl: out must be a place that can be written, got 'a' (full)",
        ),
        (
            httpx.ConnectError("refused", request=httpx.Request("GET", "http://a:1/v1/models")),
            1,
            "sdxl: url must be a service that answers, got http://a:1/v1/models (refused)",
        ),
        (KeyError("weight"), 1, "unexpected KeyError: 'weight' (SDXL_TRACEBACK=1 shows where)"),
        (RuntimeError("two\nlines"), 1, "unexpected RuntimeError: two lines"),
    ],
)
def test_errors_are_one_line(
    error: Exception,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(cli.TRACEBACK, raising=False)
    monkeypatch.setattr(cli, "command", raising(error))
    assert cli.main(["render"]) == code
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and line in err


def test_a_variable_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.TRACEBACK, "1")
    monkeypatch.setattr(cli, "command", raising(KeyError("weight")))
    with pytest.raises(KeyError):
        cli.main(["render"])


def test_an_interrupt_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "command", raising(KeyboardInterrupt()))
    assert cli.main(["render"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_closed_output_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "sdxl.cli", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
