"""A double of a terminal: it answers queries like known terminals, and keeps the drawn pictures.

It imitates their answers and cursor movements; tests/serve/test_terminal_xterm.py uses a real one.
"""

from __future__ import annotations

import base64
import fcntl
import io
import itertools
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from tests.serve.services import ROOT
from tests.serve.sixels import decoded
from tests.waiting import wait_until

ROWS, COLUMNS, CELL = 24, 80, (10, 20)
NAME, CELL_SIZE, ATTRIBUTES = b"\x1b[>0q", b"\x1b[16t", b"\x1b[c"
KITTY = b"\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\"
COLOURS = b"\x1b[?1;1;0S"
SOON_S = 30.0
FIRST_MARK, MARKS = 1000, re.compile(rb"\x1b\[1\d\d\dm")
"""invalid colours, which change nothing and mark how much has been read"""
Answers = Mapping[bytes, bytes]

CELL_TOLD = b"\x1b[6;20;10t"
KINDS: Mapping[str, Answers] = {
    "kitty": {
        NAME: b"\x1bP>|kitty(0.32.2)\x1b\\",
        CELL_SIZE: CELL_TOLD,
        KITTY: b"\x1b_Gi=31;OK\x1b\\",
        ATTRIBUTES: b"\x1b[?62;c",
    },
    "kitty without graphics": {
        NAME: b"\x1bP>|WezTerm 20240203\x1b\\",
        KITTY: b"\x1b_Gi=31;ENOTSUPPORTED:off\x1b\\",
        ATTRIBUTES: b"\x1b[?65;4;6;18;22c",
    },
    "iterm": {
        NAME: b"\x1bP>|iTerm2 3.5.11\x1b\\",
        CELL_SIZE: CELL_TOLD,
        KITTY: b"\x1b_GOK\x1b\\",
        ATTRIBUTES: b"\x1b[?62;4c",
    },
    "sixel": {
        NAME: b"\x1bP>|foot(1.16.2)\x1b\\",
        CELL_SIZE: CELL_TOLD,
        COLOURS: b"\x1b[?1;0;256S",
        ATTRIBUTES: b"\x1b[?62;4;22c",
    },
    "sixel in 16 colours": {
        CELL_SIZE: CELL_TOLD,
        COLOURS: b"\x1b[?1;0;16S",
        ATTRIBUTES: b"\x1b[?63;1;2;4;6;9;15;22c",
    },
    "none": {NAME: b"\x1bP>|VTE(7402)\x1b\\", ATTRIBUTES: b"\x1b[?65;1;9c"},
    "fourteen": {ATTRIBUTES: b"\x1b[?4;14;24c"},
    "tmux": {NAME: b"\x1bP>|tmux 3.4\x1b\\", ATTRIBUTES: b"\x1b[?1;2;4c"},
    "silent": {},
}
"""the answers of each terminal, from its documentation or users' reports"""


@dataclass
class Drawn:
    line: int
    """counted from the first line ever written, including scrolled lines"""
    column: int
    protocol: str
    picture: Image.Image
    cells: tuple[int, int] | None
    """columns and rows, if given"""
    number: int = 0


@dataclass
class Display:
    """The cursor, lines and pictures after these bytes. A picture moves the cursor as far as on the
    known terminal that moves it most."""

    rows: int = ROWS
    lines: dict[int, str] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    erased: list[int] = field(default_factory=list)
    line: int = 0
    column: int = 0
    unfinished: bytes = b""
    _top: int = 0
    _saved: tuple[int, int] = (0, 0)
    _chunks: bytes = b""
    _said: dict[str, str] = field(default_factory=dict)

    PARTS = re.compile(
        rb"\x1b_(?P<apc>[^\x1b]*)\x1b\\|\x1bP(?P<dcs>[^\x1b]*)\x1b\\"
        rb"|\x1b\](?P<osc>[^\x1b\x07]*)(?:\x07|\x1b\\)|\x1b\[(?P<csi>[?>]?[\d;]*[A-Za-z])"
        rb"|\x1b(?P<esc>[78\\])|(?P<cut>\x1b(?:\[[\d;]*)?(?=\x1b))|(?P<control>[\r\n\x08])"
        rb"|(?P<text>[^\x1b\r\n\x08]+)",
        re.DOTALL,
    )

    def take(self, data: bytes) -> Display:
        at = 0
        while at < len(data):
            part = self.PARTS.match(data, at)
            if part is None:
                self.unfinished = data[at:]
                break
            at = part.end()
            getattr(self, f"_{part.lastgroup}")(part[part.lastgroup or 0])
        return self

    @property
    def text(self) -> list[str]:
        return [line.rstrip() for _, line in sorted(self.lines.items()) if line.strip()]

    def _down(self, lines: int) -> None:
        self.line += lines
        self._top = max(self._top, self.line - self.rows + 1)

    def _text(self, data: bytes) -> None:
        text = data.decode()
        line = self.lines.get(self.line, "").ljust(self.column)
        self.lines[self.line] = line[: self.column] + text + line[self.column + len(text) :]
        self.column += len(text)

    def _control(self, data: bytes) -> None:
        if data == b"\n":
            self._down(1)
        self.column = 0

    def _esc(self, data: bytes) -> None:
        # Like true terminals, this saves a place on the screen, not in the text.
        if data == b"7":
            self._saved = self.line - self._top, self.column
        elif data == b"8":
            self.line, self.column = self._saved[0] + self._top, self._saved[1]

    def _cut(self, data: bytes) -> None:
        """Do nothing: another sequence began inside this one."""

    def _csi(self, data: bytes) -> None:
        count = int(data[:-1]) if data[:-1].isdigit() else 1
        match data[-1:]:
            case b"A":
                self.line = max(self._top, self.line - count)
            case b"B":
                self.line = min(self._top + self.rows - 1, self.line + count)
            case b"K":
                self.lines[self.line] = self.lines.get(self.line, "")[: self.column]
            case b"J":
                assert self.column == 0
                self.lines = {at: line for at, line in self.lines.items() if at < self.line}
                self.drawn = [each for each in self.drawn if each.line < self.line]

    def _osc(self, data: bytes) -> None:
        header, _, text = data.partition(b":")
        assert header.startswith(b"1337;File=")
        values = dict(re.findall(rb"(\w+)=(\w+)", header.removeprefix(b"1337;File=")))
        assert values[b"inline"] == b"1"
        file = base64.b64decode(text, validate=True)
        assert int(values[b"size"]) == len(file)
        cells = int(values[b"width"]), int(values[b"height"])
        self._draw("iterm", Image.open(io.BytesIO(file)), cells)
        self._down(cells[1] - 1)
        self.column = cells[0]

    def _dcs(self, data: bytes) -> None:
        if (picture := decoded(data)) is not None:
            self._draw("sixel", picture, None)
            self._down(-(-picture.height // CELL[1]))

    def _apc(self, data: bytes) -> None:
        """The first part of a picture describes it; the other parts continue its data."""
        header, _, text = data.removeprefix(b"G").partition(b";")
        values = dict(each.split("=") for each in header.decode().split(","))
        if values.get("a") == "q":
            return
        assert values["q"] == "2", "its answer would be left in the input"
        if values.get("a") == "d":
            self.erased.append(int(values["i"]))
            return
        self._said |= values
        self._chunks += text
        assert len(text) <= 4096
        if values["m"] == "0" and self._chunks:
            file = base64.b64decode(self._chunks, validate=True)
            said_first, self._said, self._chunks = self._said, {}, b""
            assert (said_first["a"], said_first["f"], said_first["C"]) == ("T", "100", "1")
            cells = int(said_first["c"]), int(said_first["r"])
            self._draw("kitty", Image.open(io.BytesIO(file)), cells, int(said_first["i"]))

    def _draw(
        self, protocol: str, picture: Image.Image, cells: tuple[int, int] | None, number: int = 0
    ) -> None:
        self.drawn.append(
            Drawn(self.line, self.column, protocol, picture.convert("RGB"), cells, number)
        )


class DoubleTerminal:
    """`late_s`: the pause before each answer; `pieces`: answers come byte by byte."""

    def __init__(self, answers: Answers, late_s: float = 0.0, pieces: bool = False) -> None:
        self.master, self.slave = pty.openpty()
        size = struct.pack("HHHH", ROWS, COLUMNS, COLUMNS * CELL[0], ROWS * CELL[1])
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)
        self.answers, self.late_s, self.pieces = answers, late_s, pieces
        self._received, self._seen = b"", 0
        self._is_closed, self._marks = False, itertools.count(FIRST_MARK)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.slave)

    def display(self, rows: int = ROWS) -> Display:
        self.settle()
        return Display(rows).take(self.output)

    def settle(self) -> None:
        """Write a mark and wait until it is read, so that all output is read."""
        mark = b"\x1b[%dm" % next(self._marks)
        os.write(self.slave, mark)
        wait_until(lambda: mark in self._received, SOON_S, 0.01, lambda: self._received[-300:])

    @property
    def output(self) -> bytes:
        return MARKS.sub(b"", self._received)

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        os.close(self.master)
        os.close(self.slave)

    def _run(self) -> None:
        while not self._is_closed:
            if select.select([self.master], [], [], 0.02)[0]:
                self._received += os.read(self.master, 65536)
                self._answer()

    def _answer(self) -> None:
        asked = re.compile(b"|".join(map(re.escape, (NAME, CELL_SIZE, ATTRIBUTES, KITTY, COLOURS))))
        for question in asked.finditer(self._received, self._seen):
            self._seen = question.end()
            time.sleep(self.late_s)
            answer = self.answers.get(question[0], b"")
            step = 1 if self.pieces else max(1, len(answer))
            for at in range(0, len(answer), step):
                self.type(answer[at : at + step])
                time.sleep(0.001 * self.pieces)


@contextmanager
def terminal(kind: str, late_s: float = 0.0, pieces: bool = False) -> Iterator[DoubleTerminal]:
    found = DoubleTerminal(KINDS[kind], late_s, pieces)
    try:
        yield found
    finally:
        found.close()


OWNER = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(2, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)
"""Make the terminal the process's controlling terminal, as for a shell's command."""


def run_in(
    terminal: DoubleTerminal,
    *argv: str,
    environment: Mapping[str, str] | None = None,
    stdout: int | None = None,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, sys.executable, *argv],
        cwd=ROOT,
        env=environment_with(environment or {}),
        stdin=terminal.slave,
        stdout=terminal.slave if stdout is None else stdout,
        stderr=terminal.slave,
        start_new_session=True,
    )


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables of the terminal in which the tests run."""
    named = ("TERM", "TERM_PROGRAM", "TMUX", "STY", "ZELLIJ", "INSIDE_EMACS", "KITTY_WINDOW_ID")
    kept = {name: value for name, value in os.environ.items() if name not in named}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **more}
