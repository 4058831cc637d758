"""Finds out by queries which pictures the terminal on stderr can show.

Environment variables may be wrong, as multiplexers, editors' terminals and remote shells inherit
them. So they only prevent queries to terminals that handle queries badly. A multiplexer answers for
itself.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from sdxl.params import InvalidParams

AUTO, OFF = "auto", "off"
KITTY, ITERM, SIXEL = "kitty", "iterm", "sixel"
PROTOCOLS = (KITTY, ITERM, SIXEL)
PREVIEWS = (AUTO, OFF, *PROTOCOLS)

ANSWER_S = 1.0
"""Timeout of an answer, which takes milliseconds, or tenths of a second over a slow connection."""
TMUX_S = 2.0
SILENT = ("", "dumb", "unknown", "linux", "emacs")
"""Values of `TERM` for terminals that show no pictures and may print unknown queries."""
SPEAK_KITTY = ("kitty", "ghostty", "wezterm", "konsole")
KITTY_TERMS = ("xterm-kitty", "xterm-ghostty")
"""Only these terminals get kitty's query: some others print it."""
MULTIPLEXERS = ("tmux", "screen", "zellij")
MULTIPLEXER_VARIABLES = ("TMUX", "STY", "ZELLIJ")
SIXEL_ATTRIBUTE = "4"
USUAL_COLOURS = 256

# Every terminal answers the last query (DA1); after its answer no other will come. The first
# queries are for the terminal's name (XTVERSION) and a cell's pixels.
LAST = b"\x1b[c"
QUERIES = b"\x1b[>0q\x1b[16t" + LAST
KITTY_QUERY = b"\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\" + LAST
COLOURS_QUERY = b"\x1b[?1;1;0S" + LAST
# Save the cursor; return and erase a query that the terminal printed instead of answering.
HERE, BACK = b"\x1b7", b"\x1b8\x1b[K"

NAME = re.compile(rb"\x1bP>\|([^\x1b\x07]*)")
CELL = re.compile(rb"\x1b\[6;(\d+);(\d+)t")
ATTRIBUTES = re.compile(rb"\x1b\[\?([\d;]*)c")
KITTY_ANSWER = re.compile(rb"\x1b_G(?:i=31)?;?OK\x1b\\")
COLOURS = re.compile(rb"\x1b\[\?1;0;(\d+)S")


@dataclass(frozen=True)
class Screen:
    """Size in cells, and a cell's size in pixels; 0 if unknown."""

    columns: int
    rows: int
    cell: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Terminal:
    """A terminal that shows pictures."""

    stream: TextIO
    protocol: str
    cell: tuple[int, int] = (0, 0)
    colours: int = USUAL_COLOURS

    def write(self, data: bytes) -> None:
        """Write past the stream's buffer, in which an interrupt would leave a part."""
        self.stream.flush()
        left = memoryview(data)
        while left:
            left = left[os.write(self.stream.fileno(), left) :]

    @property
    def screen(self) -> Screen:
        reply = screen_of(self.stream.fileno())
        return Screen(reply.columns, reply.rows, self.cell if all(self.cell) else reply.cell)

    @property
    def is_ours(self) -> bool:
        """Whether this command is in the foreground and may draw."""
        try:
            return os.tcgetpgrp(self.stream.fileno()) == os.getpgrp()
        except OSError:
            return True


def find(preview: str, is_redirected: bool) -> Terminal | None:
    """Find a terminal that shows previews, or None. `is_redirected`: another program reads the
    output."""
    if preview == OFF:
        return None
    is_terminal = os.name == "posix" and sys.stderr.isatty()
    if preview != AUTO:
        if not is_terminal:
            raise InvalidParams("preview", preview, "needs a terminal on stderr")
        return Terminal(sys.stderr, preview)
    if not is_terminal or is_redirected or is_silent(os.environ):
        return None
    return query_terminal(sys.stderr, os.environ)


def check(preview: str) -> str:
    if preview not in PREVIEWS:
        raise InvalidParams.unknown("preview", preview, PREVIEWS)
    return preview


def is_silent(environment: Mapping[str, str]) -> bool:
    term = environment.get("TERM", "")
    return (
        term in SILENT
        or term.startswith("eterm")
        or "INSIDE_EMACS" in environment
        or environment.get("TERM_PROGRAM") == "Apple_Terminal"
    )


def query_terminal(stream: TextIO, environment: Mapping[str, str]) -> Terminal | None:
    """Query the terminal; return None if it supports no known protocol."""
    try:
        descriptor = os.open(os.ttyname(stream.fileno()), os.O_RDWR | os.O_NOCTTY)
    except OSError:
        # The stream has no file, or the terminal is in another container.
        return None
    try:
        if not is_foreground(descriptor):
            return None
        stream.flush()
        with without_echo(descriptor):
            reply = conversation(descriptor, environment)
    finally:
        os.close(descriptor)
    protocol = protocol_of(reply, environment)
    return Terminal(stream, protocol, cell_in(reply), colours_in(reply)) if protocol else None


def protocol_of(reply: bytes, environment: Mapping[str, str]) -> str | None:
    has_sixel = SIXEL_ATTRIBUTE in attributes_in(reply)
    name = name_in(reply)
    if is_multiplexer(name, environment):
        return SIXEL if has_sixel and passes_sixel(environment) else None
    if name.startswith("iterm"):
        return ITERM
    if KITTY_ANSWER.search(reply):
        return KITTY
    return SIXEL if has_sixel else None


def is_foreground(descriptor: int) -> bool:
    """Whether this command is in the terminal's foreground, so that answers reach it."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def without_echo(descriptor: int) -> Iterator[None]:
    """Turn the terminal's echo off. Signals wait meanwhile, so that none ends the command before
    the terminal is restored."""
    import termios

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        before = termios.tcgetattr(descriptor)
        changed = list(before)
        changed[3] &= ~(termios.ICANON | termios.ECHO)
        try:
            termios.tcsetattr(descriptor, termios.TCSANOW, changed)
            yield
        finally:
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def conversation(descriptor: int, environment: Mapping[str, str]) -> bytes:
    """Send the safe queries, then one that depends on the terminal. Return the answers; none if
    the terminal does not answer."""
    is_writable = bool(select.select([], [descriptor], [], 0)[1])
    if is_readable(descriptor, 0) or not is_writable:
        # The user typed ahead, and the input would be lost among the answers; or Ctrl-S has stopped
        # the output.
        return b""
    reply = answer(descriptor, QUERIES)
    if reply and may_speak_kitty(name_in(reply), environment):
        return reply + answer(descriptor, KITTY_QUERY)
    if SIXEL_ATTRIBUTE in attributes_in(reply):
        return reply + answer(descriptor, COLOURS_QUERY)
    return reply


def answer(descriptor: int, queries: bytes) -> bytes:
    """Return the terminal's answers up to the last one; none if the last does not come. No input is
    left for later readers."""
    reply, until = b"", time.monotonic() + ANSWER_S
    os.write(descriptor, HERE + queries)
    try:
        while (left := until - time.monotonic()) > 0 and is_readable(descriptor, left):
            reply += os.read(descriptor, 4096)
            if ATTRIBUTES.search(reply):
                return reply
    finally:
        os.write(descriptor, BACK)
        discard_input(descriptor)
    # The answer may come later, until the command ends.
    atexit.register(discard_input_of, os.ttyname(descriptor))
    return b""


def discard_input_of(terminal: str) -> None:
    try:
        descriptor = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    except OSError:
        # The terminal was closed.
        return
    try:
        if is_foreground(descriptor):
            discard_input(descriptor)
    finally:
        os.close(descriptor)


def discard_input(descriptor: int) -> None:
    import termios

    termios.tcflush(descriptor, termios.TCIFLUSH)


def is_readable(descriptor: int, within_s: float) -> bool:
    return bool(select.select([descriptor], [], [], within_s)[0])


def name_in(reply: bytes) -> str:
    match = NAME.search(reply)
    return match[1].decode("ascii", "replace").casefold() if match else ""


def cell_in(reply: bytes) -> tuple[int, int]:
    match = CELL.search(reply)
    return (int(match[2]), int(match[1])) if match else (0, 0)


def attributes_in(reply: bytes) -> list[str]:
    """Return the device attributes without the first, the terminal's type."""
    match = ATTRIBUTES.search(reply)
    return match[1].decode().split(";")[1:] if match else []


def colours_in(reply: bytes) -> int:
    match = COLOURS.search(reply)
    return min(max(int(match[1]), 2), USUAL_COLOURS) if match else USUAL_COLOURS


def is_multiplexer(name: str, environment: Mapping[str, str]) -> bool:
    term = environment.get("TERM", "")
    return (
        name.startswith(MULTIPLEXERS)
        or term.startswith(MULTIPLEXERS)
        or bool({*MULTIPLEXER_VARIABLES} & {*environment})
    )


def may_speak_kitty(name: str, environment: Mapping[str, str]) -> bool:
    is_known = name.startswith(SPEAK_KITTY) or environment.get("TERM") in KITTY_TERMS
    return is_known and not is_multiplexer(name, environment)


def passes_sixel(environment: Mapping[str, str]) -> bool:
    """Whether the multiplexer shows sixels. tmux knows whether its terminal does; others are not
    asked."""
    if "TMUX" not in environment:
        return False
    command = ["tmux", "display-message", "-p", "#{client_termfeatures}"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TMUX_S
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return SIXEL in done.stdout.strip().split(",")


def screen_of(descriptor: int) -> Screen:
    import fcntl
    import struct
    import termios

    reply = fcntl.ioctl(descriptor, termios.TIOCGWINSZ, bytes(8))
    rows, columns, across, down = struct.unpack("HHHH", reply)
    if not (rows and columns):
        return Screen(0, 0)
    return Screen(columns, rows, (across // columns, down // rows))
