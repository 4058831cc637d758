"""The terminal is asked for its abilities, and is unchanged afterwards, whatever it answers."""

from __future__ import annotations

import json
import os
import signal
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sdxl.params import InvalidParams
from serve.render import terminal
from tests.serve.terminals import ATTRIBUTES, KITTY, NAME, DoubleTerminal, run_in
from tests.serve.terminals import terminal as double

ASK = """
import json, os, select, sys, termios
from serve.render import terminal
before = termios.tcgetattr(2)
{first}
found = terminal.find("auto", False)
after = termios.tcgetattr(2)
raw = list(after)
raw[3] &= ~(termios.ICANON | termios.ECHO)
termios.tcsetattr(2, termios.TCSANOW, raw)
left = os.read(0, 999).decode() if select.select([0], [], [], 0.1)[0] else ""
termios.tcsetattr(2, termios.TCSANOW, after)
with open(sys.argv[1], "w") as file:
    json.dump([found and [found.protocol, found.cell, found.colours], before == after, left], file)
"""
"""a program that prints the result, whether the modes are unchanged, and the unread input"""
CELL = [10, 20]


def asked(
    there: DoubleTerminal,
    tmp_path: Path,
    environment: Mapping[str, str] | None = None,
    first: str = "",
) -> tuple[Any, bool, str]:
    report = tmp_path / "said"
    script = ASK.replace("{first}", first)
    assert run_in(there, "-c", script, str(report), environment=environment).wait(50) == 0
    protocol, is_as_before, left = json.loads(report.read_text())
    return protocol, is_as_before, left


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("kitty", ["kitty", CELL, 256]),
        ("kitty without graphics", ["sixel", [0, 0], 256]),
        ("iterm", ["iterm", CELL, 256]),
        ("sixel", ["sixel", CELL, 256]),
        ("sixel in 16 colours", ["sixel", CELL, 16]),
        ("none", None),
        ("fourteen", None),
        ("tmux", None),
        ("silent", None),
    ],
)
def test_the_answers_decide_the_protocol(kind: str, found: object, tmp_path: Path) -> None:
    with double(kind) as there:
        assert asked(there, tmp_path) == (found, True, "")
        display = there.display()
        assert not display.drawn and not display.unfinished
        assert display.text == [], "the question is not seen, and no answer"


def test_answers_may_come_in_pieces_and_late(tmp_path: Path) -> None:
    for kind in ("kitty", "iterm"):
        with double(kind, late_s=0.05, pieces=True) as there:
            assert asked(there, tmp_path) == ([kind, CELL, 256], True, "")


def test_an_answer_after_its_time_is_not_left_for_the_shell(tmp_path: Path) -> None:
    wait = "terminal.ANSWER_S = 0.2"
    report = tmp_path / "said"
    script = ASK.replace("{first}", wait).partition("after =")[0]
    script += "import time\ntime.sleep(1.5)\nopen(sys.argv[1], 'w').write(repr(found))"
    with double("sixel", late_s=0.4) as there:
        before = there.modes
        assert run_in(there, "-c", script, str(report)).wait(50) == 0
        assert report.read_text() == "None" and there.modes == before
        assert left_in(there) == b""


def left_in(there: DoubleTerminal) -> bytes:
    modes = there.modes
    modes[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(there.slave, termios.TCSANOW, modes)
    os.set_blocking(there.slave, False)
    try:
        return os.read(there.slave, 999)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize(
    "environment",
    [
        *({"TERM": name} for name in ("dumb", "linux", "", "eterm-color")),
        {"INSIDE_EMACS": "30.1,vterm"},
        {"TERM_PROGRAM": "Apple_Terminal"},
    ],
)
def test_a_terminal_too_simple_is_not_asked(environment: dict[str, str], tmp_path: Path) -> None:
    with double("kitty") as there:
        assert asked(there, tmp_path, environment) == (None, True, "")
        assert there.output == b""


@pytest.mark.parametrize(
    "environment",
    [
        {"KITTY_WINDOW_ID": "1", "TERM": "screen-256color", "STY": "1.pts"},
        {"KITTY_WINDOW_ID": "1", "TERM": "xterm-kitty", "TMUX": "/tmp/no/tmux,1,0"},
        {"LC_TERMINAL": "iTerm2", "TERM_PROGRAM": "iTerm.app", "TERM": "tmux-256color"},
        {"TERM": "xterm-kitty", "ZELLIJ": "0"},
    ],
)
@pytest.mark.parametrize("kind", ["tmux", "kitty"])
def test_a_multiplexer_gets_no_picture(
    kind: str, environment: dict[str, str], tmp_path: Path
) -> None:
    with double(kind) as there:
        assert asked(there, tmp_path, environment) == (None, True, "")
        # tmux reads it as a title, screen as its status line.
        assert KITTY not in there.output


@pytest.mark.parametrize(
    ("features", "found"), [("256,RGB,sixel,title", "sixel"), ("256,RGB,title", None), ("", None)]
)
def test_tmux_is_asked_about_sixels(features: str, found: str | None, tmp_path: Path) -> None:
    program = tmp_path / "tmux"
    program.write_text(
        f'#!/bin/sh\ntest "$*" = "display-message -p #{{client_termfeatures}}" && echo {features}\n'
    )
    program.chmod(0o755)
    environment = {"TMUX": "x,1,0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with double("tmux") as there:
        protocol, is_as_before, left = asked(there, tmp_path, environment)
        assert (protocol and protocol[0], is_as_before, left) == (found, True, "")


def test_variables_alone_prove_nothing(tmp_path: Path) -> None:
    """Variables may come from the terminal in which this one was started."""
    environment = {"KITTY_WINDOW_ID": "1", "LC_TERMINAL": "iTerm2", "TERM": "xterm-kitty"}
    environment["TERM_PROGRAM"] = "iTerm.app"
    with double("none") as there:
        assert asked(there, tmp_path, environment) == (None, True, "")


def test_what_was_typed_ahead_is_kept_and_nothing_asked(tmp_path: Path) -> None:
    with double("kitty") as there:
        there.type(b"ls\n")
        protocol, is_as_before, left = asked(there, tmp_path)
        assert (protocol, is_as_before, left) == (None, True, "ls\n")
        assert KITTY not in there.output and NAME not in there.output


BEHIND = """
import signal
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
if (child := os.fork()) != 0:
    os.waitpid(child, 0)
    os._exit(0)
os.setpgid(0, 0)
"""


def test_a_command_in_the_background_does_not_ask(tmp_path: Path) -> None:
    with double("kitty") as there:
        assert asked(there, tmp_path, first=BEHIND) == (None, True, "")
        assert NAME not in there.output


def test_a_stopped_terminal_is_not_waited_for(tmp_path: Path) -> None:
    with double("kitty") as there:
        termios.tcflow(there.slave, termios.TCOOFF)
        assert asked(there, tmp_path)[:2] == (None, True)
        termios.tcflow(there.slave, termios.TCOON)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP])
def test_a_signal_restores_the_modes_first(number: signal.Signals, tmp_path: Path) -> None:
    with double("silent") as there:
        before = there.modes
        script = (
            "import signal\nfrom serve.render import terminal\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
            "terminal.find('auto', False)\nimport time; time.sleep(20)"
        )
        process = run_in(there, "-c", script)
        while ATTRIBUTES not in there.output:
            time.sleep(0.01)
        assert there.modes != before, "it waits for the answer, which is not to be echoed"
        os.killpg(process.pid, number)
        if number == signal.SIGTSTP:
            # A group without a parent in its session is not stopped, so only its continuation is
            # checked.
            time.sleep(1.5)
            process.kill()
        process.wait(30)
        assert there.modes == before


def test_the_modes_are_restored_after_an_exception(tmp_path: Path) -> None:
    with double("kitty") as there:
        before = there.modes
        script = (
            "from serve.render import terminal\n"
            "terminal.conversation = lambda *_: 1 / 0\nterminal.find('auto', False)"
        )
        assert run_in(there, "-c", script).wait(50) == 1
        there.settle()
        assert there.modes == before and b"ZeroDivisionError" in there.output


def test_redirected_output_asks_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "query_terminal", lambda *_: pytest.fail("asked"))
    assert terminal.find("auto", is_redirected=True) is None
    assert terminal.find("off", is_redirected=False) is None
    with double("kitty") as there, os.fdopen(os.dup(there.slave), "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm-kitty")
        assert terminal.find("auto", is_redirected=True) is None
        assert there.output == b""


def test_a_named_protocol_needs_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParams, match="preview needs a terminal on stderr"):
        terminal.find("kitty", is_redirected=False)
    with double("none") as there, os.fdopen(os.dup(there.slave), "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        found = terminal.find("sixel", is_redirected=True)
        assert found is not None and found.protocol == "sixel" and there.output == b""
        assert found.screen == terminal.Screen(80, 24, (10, 20))
