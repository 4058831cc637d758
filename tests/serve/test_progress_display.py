"""Pictures and a progress bar on a terminal: each in its place above the printed lines, and no
pictures where they do not fit.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from fcntl import ioctl
from itertools import count

import numpy as np
import pytest
from PIL import Image
from tqdm import tqdm

from sdxl.images import BrokenImage, Pixels
from serve.render import progress_display
from serve.render.progress_display import MOST_ROWS, PERIOD_S, RenderDisplay
from serve.render.terminal import PROTOCOLS, Terminal
from serve.render.terminal_pictures import END, fitted
from tests.serve.terminals import CELL, COLUMNS, ROWS, Display, DoubleTerminal
from tests.serve.terminals import terminal as double
from tests.serve.test_terminal_pictures import difference

SIZE = 64
BEGINNINGS = re.compile(rb"\x1b_Ga=T|\x1bP0;1;0q|\x1b\]1337")
"""of pictures in the protocols"""
Watch = Callable[[DoubleTerminal, str | None], AbstractContextManager[RenderDisplay]]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.made: list[float] = []
        """times of previews"""

    def __call__(self) -> float:
        return self.now_s

    def make(self) -> Pixels:
        self.made.append(self.now_s)
        return picture(9)


def picture(shade: int) -> Pixels:
    pixels = np.full((SIZE, SIZE, 3), shade, np.uint8)
    pixels[: SIZE // 2, :, 0] = 255
    return pixels


def write_line(line: str) -> None:
    """Print a line as the command does for a picture."""
    tqdm.write(line, file=sys.stderr)


def form(watcher: RenderDisplay, *shades: int) -> None:
    clock = watcher.clock
    assert isinstance(clock, Clock)
    for shade in shades:
        watcher.ticked(1)
        clock.now_s += 1.01 * PERIOD_S
        show = watcher.on_forming
        if show is not None:
            show(lambda shade=shade: picture(shade))  # type: ignore[misc]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Watch:
    """Return a function that opens a display on a terminal of a protocol."""

    @contextmanager
    def opened(there: DoubleTerminal, protocol: str | None) -> Iterator[RenderDisplay]:
        with os.fdopen(os.dup(there.slave), "w") as stream:
            monkeypatch.setattr("sys.stderr", stream)
            shows = Terminal(stream, protocol, CELL) if protocol else None
            with RenderDisplay(20, shows, clock) as watcher:
                yield watcher

    return opened


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_picture_forms_in_place_above_its_line(protocol: str, watch: Watch) -> None:
    with double("none") as there:
        with watch(there, protocol) as watcher:
            write_line("first line")
            form(watcher, 10, 20, 30)
            watcher.finished(picture(40))
            write_line("a.png  seed 1")
            form(watcher, 50, 60)
            watcher.finished(picture(70))
            write_line("b.png  seed 2")
        display = there.display()
    shades = [10, 20, 30, 40, 50, 60, 70]
    expected = [fitted(Image.fromarray(picture(shade)), (240, 240)) for shade in shades]
    assert [each.protocol for each in display.drawn] == [protocol] * 7
    for found, wanted in zip(display.drawn, expected, strict=True):
        assert difference(found.picture, wanted) < 2
    # Line 0 was printed. Each picture takes twelve lines and has one printed line.
    assert [each.line for each in display.drawn] == [1] * 4 + [14] * 3
    assert {each.column for each in display.drawn} == {0}
    assert display.text == ["first line", "a.png  seed 1", "b.png  seed 2"]
    assert {at for at, line in display.lines.items() if line.strip()} == {0, 13, 26}
    assert (display.line, display.column) == (27, 0)
    if protocol == "kitty":
        first, second = {each.number for each in display.drawn[:4]}, display.drawn[4].number
        assert len(first) == 1 and second not in first and not display.erased


def test_the_bar_goes_on_below_the_picture(watch: Watch) -> None:
    with double("none") as there, watch(there, "kitty") as watcher:
        form(watcher, 10, 20)
        display = there.display()
        assert display.text and "/20 [" in display.text[-1]
        assert max(display.lines) == display.line == MOST_ROWS
        assert [each.line for each in display.drawn] == [0, 0]


def test_without_a_terminal_for_pictures_the_bar_is_unchanged(watch: Watch) -> None:
    with double("none") as there:
        with watch(there, None) as watcher:
            assert watcher.on_forming is None
            form(watcher, 10, 20)
            watcher.finished(picture(30))
            write_line("a.png")
        there.settle()
        output = there.output
    assert b"/20 [" in output and b"a.png" in output
    assert b"\x1b" not in output.replace(b"\x1b[A", b"")


def test_a_preview_comes_at_most_every_fifth_of_a_second(watch: Watch, clock: Clock) -> None:
    with double("none") as there, watch(there, "sixel") as watcher:
        show = watcher.on_forming
        assert show is not None
        for _ in range(100):
            clock.now_s += PERIOD_S / 10 + 1e-6
            show(clock.make)
    assert len(clock.made) == 10
    assert np.diff(clock.made).min() >= PERIOD_S


def test_a_slow_terminal_gets_fewer_pictures(
    monkeypatch: pytest.MonkeyPatch, watch: Watch, clock: Clock
) -> None:
    """A picture takes half a second. Two seconds and a tenth of the time may go to pictures."""

    def write(self: Terminal, data: bytes) -> None:
        clock.now_s += 0.5 * (len(data) > 100)

    monkeypatch.setattr(Terminal, "write", write)
    with double("none") as there, watch(there, "kitty") as watcher:
        show = watcher.on_forming
        assert show is not None
        while clock.now_s < 100:
            clock.now_s += 0.1
            show(clock.make)
    assert 20 <= len(clock.made) <= 26


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("the engine broke")])
def test_an_unfinished_picture_does_not_stay(
    protocol: str, error: type[BaseException] | BaseException, watch: Watch
) -> None:
    with double("none") as there:
        modes = there.modes
        with pytest.raises((KeyboardInterrupt, RuntimeError)), watch(there, protocol) as watcher:
            write_line("first line")
            form(watcher, 10, 20)
            raise error
        display = there.display()
        assert there.modes == modes
    assert display.text == ["first line"] and not display.drawn and not display.unfinished
    assert (display.line, display.column) == (1, 0)
    assert len(display.erased) == (protocol == "kitty")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("share", "which", "is_lost"),
    [(share, which, False) for share in (0.0, 0.001, 0.1, 0.5, 0.99) for which in (0, 2)]
    + [(share, 2, True) for share in (0.1, 0.5, 0.99)],
)
def test_an_interrupt_in_the_middle_of_a_picture_leaves_nothing_of_it(
    protocol: str,
    share: float,
    which: int,
    is_lost: bool,
    monkeypatch: pytest.MonkeyPatch,
    watch: Watch,
) -> None:
    """`is_lost`: everything was written, but the kernel dropped the rest."""
    write, pictures = Terminal.write, count()

    def cut(self: Terminal, data: bytes) -> None:
        if len(data) > 300 and next(pictures) == which:
            write(self, data[: int(share * len(data))])
            if not is_lost:
                raise KeyboardInterrupt
        else:
            write(self, data)

    monkeypatch.setattr(Terminal, "write", cut)
    with double("none") as there:
        with pytest.raises(KeyboardInterrupt), watch(there, protocol) as watcher:
            write_line("first line")
            form(watcher, 10, 20, 30)
            raise KeyboardInterrupt
        os.write(there.slave, b"$ ls\n")
        there.settle()
        seen = until_interrupted(there.output, which)
    display = Display().take(seen)
    assert display.text == ["first line", "$ ls"] and not display.drawn and not display.unfinished
    assert (display.line, display.column) == (2, 0)


def until_interrupted(output: bytes, which: int) -> bytes:
    """Return the output without the sequence that was cut off, up to the next ST."""
    begun = [each.start() for each in re.finditer(BEGINNINGS, output)]
    if len(begun) <= which:
        return output
    at = begun[which]
    return output[:at] + output[output.index(END, at) + len(END) :]


def test_a_preview_that_cannot_be_made_costs_no_picture(watch: Watch, clock: Clock) -> None:
    def broken() -> Pixels:
        raise BrokenImage("3 of 9 values are not finite")

    with double("none") as there:
        with watch(there, "kitty") as watcher:
            form(watcher, 10)
            show = watcher.on_forming
            assert show is not None
            for _ in range(3):
                clock.now_s += 1.01 * PERIOD_S
                show(broken)
            watcher.finished(picture(20))
            write_line("a.png")
        display = there.display()
    assert display.text == ["sdxl render: no more previews: 3 of 9 values are not finite", "a.png"]
    assert not display.drawn


def test_a_window_of_another_size_gets_a_place_of_its_own(watch: Watch) -> None:
    with double("none") as there:
        with watch(there, "iterm") as watcher:
            form(watcher, 10)
            size = struct.pack("HHHH", ROWS, COLUMNS - 20, 0, 0)
            ioctl(there.slave, termios.TIOCSWINSZ, size)
            form(watcher, 20, 30)
            watcher.finished(picture(40))
        lines = [each.line for each in there.display().drawn]
    assert lines == [0, MOST_ROWS, MOST_ROWS, MOST_ROWS]


def test_a_picture_goes_on_below_what_others_wrote(watch: Watch) -> None:
    with double("none") as there:
        handler = signal.getsignal(signal.SIGCONT)
        with watch(there, "iterm") as watcher:
            form(watcher, 10)
            os.write(there.slave, b"\r\n[1]+ Stopped\n$ fg\n")
            os.kill(os.getpid(), signal.SIGCONT)
            form(watcher, 20)
            watcher.finished(picture(30))
        display = there.display()
        assert signal.getsignal(signal.SIGCONT) == handler
    assert display.lines[MOST_ROWS + 1].startswith("[1]+ Stopped")
    assert [each.line for each in display.drawn] == [0] + [MOST_ROWS + 3] * 2


@pytest.mark.parametrize(("rows", "is_drawn"), [(24, True), (7, True), (6, False), (0, False)])
def test_a_low_window_gets_a_low_picture_or_none(rows: int, is_drawn: bool, watch: Watch) -> None:
    with double("none") as there:
        ioctl(there.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
        with watch(there, "iterm") as watcher:
            form(watcher, 10)
            watcher.finished(picture(20))
            write_line("a.png")
        display = there.display(rows or ROWS)
    assert display.text == ["a.png"]
    assert [each.cells and each.cells[1] for each in display.drawn] == (
        [min(MOST_ROWS, rows - progress_display.ROWS_LEFT)] * 2 if is_drawn else []
    )


def test_a_command_in_the_background_leaves_the_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    monkeypatch.setattr(Terminal, "is_ours", False)
    with double("none") as there:
        with watch(there, "kitty") as watcher:
            form(watcher, 10)
            watcher.finished(picture(20))
        assert not there.display().drawn
