"""Shows progress in the terminal: a bar of steps and, if the terminal shows pictures, a preview
above it.
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from serve.render.terminal import KITTY, Screen, Terminal

if TYPE_CHECKING:
    from sdxl.images import Pixels
    from sdxl.pipeline import Forming
    from serve.render.terminal_pictures import Frame

PERIOD_S = 0.2
MOST_ROWS = 12
FEWEST_ROWS = 4
ROWS_LEFT = 3
"""Rows of the screen for the bar and earlier lines."""
FREE_S, SHARE = 2.0, 0.1
"""Drawing may take FREE_S and this share of a command's time: a slow connection shows fewer
previews."""
SAVE, RESTORE, LINE_START, ERASE_BELOW = b"\x1b7", b"\x1b8", b"\r", b"\x1b[J"


def up(rows: int) -> bytes:
    return b"\x1b[%dA" % rows


@dataclass
class PictureArea:
    """The lines above the cursor in which previews and then the finished picture are drawn."""

    terminal: Terminal
    frame: Frame | None = None
    has_moved: bool = False
    """whether something was written below the picture"""
    _screen: Screen | None = None

    def draw(self, pixels: Pixels) -> None:
        """Draw a picture. The cursor must be at the start of a line, and returns there."""
        from PIL import Image

        from serve.render.terminal_pictures import draw_picture

        if self.has_moved or self._screen != self.terminal.screen:
            # The old picture has moved and stays where it is.
            self.leave()
        if self.frame is None:
            self._open(pixels.shape[1], pixels.shape[0])
        if self.frame is None:
            return
        terminal = self.terminal
        picture = draw_picture(
            Image.fromarray(pixels), terminal.protocol, self.frame, terminal.colours
        )
        terminal.write(SAVE + up(self.frame.rows) + LINE_START + picture + RESTORE)

    def leave(self) -> None:
        self.frame, self._screen, self.has_moved = None, None, False

    def clear(self) -> None:
        if self.frame is not None and not self.has_moved and self.terminal.is_ours:
            from serve.render.terminal_pictures import kitty_erased

            is_kitty = self.terminal.protocol == KITTY
            erased = kitty_erased(self.frame.number) if is_kitty else b""
            self.terminal.write(LINE_START + up(self.frame.rows) + erased + ERASE_BELOW)
        self.leave()

    def repair(self) -> None:
        """Make the terminal show text again, below the picture, after an interrupt that may have
        cut the picture off: at Ctrl-C the kernel drops output that the terminal has not read."""
        from serve.render.terminal_pictures import END

        if self.frame is not None:
            self.terminal.write(END if self.has_moved else END + RESTORE)

    def _open(self, width: int, height: int) -> None:
        from serve.render.terminal_pictures import frame_for

        screen = self._screen = self.terminal.screen
        rows = min(MOST_ROWS, screen.rows - ROWS_LEFT)
        if rows >= FEWEST_ROWS and screen.columns > 1:
            # A random number: pictures of earlier commands on the screen have other numbers.
            number = 1 + secrets.randbelow(2**31 - 1)
            size, columns = (width, height), screen.columns - 1
            frame = frame_for(size, columns, rows, screen.cell, number)
            # Save the cursor now, so that it can return even if a picture is cut off.
            self.terminal.write(b"\n" * frame.rows + SAVE)
            self.frame = frame


@dataclass
class RenderDisplay:
    """The display of one command; without a `terminal` only the bar."""

    total_steps: int
    terminal: Terminal | None = None
    clock: Callable[[], float] = time.monotonic
    _area: PictureArea | None = None
    _drawn_s: float = field(default=float("-inf"))
    _spent_s: float = 0.0
    _has_stopped: bool = False

    def __enter__(self) -> RenderDisplay:
        from tqdm import tqdm

        is_hidden = not sys.stderr.isatty()
        self._bar = tqdm(
            total=self.total_steps, unit="step", file=sys.stderr, disable=is_hidden, leave=False
        )
        self._began_s, self._handler = self.clock(), None
        if self.terminal is not None:
            self._area = PictureArea(self.terminal)
            self._handler = signal.signal(signal.SIGCONT, self._continued)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        # A closed terminal must not hide the command's error.
        with suppress(OSError):
            if self._area is not None:
                signal.signal(signal.SIGCONT, self._handler)
                # First of all: the terminal may take other output for a part of a cut-off picture.
                self._area.repair()
            self._bar.close()
            if self._area is not None:
                self._area.clear()

    def ticked(self, steps: int) -> None:
        self._bar.update(steps)

    @property
    def on_forming(self) -> Callable[[Forming], None] | None:
        """The callback for previews; None if they are not shown, so that none are made."""
        return None if self._area is None else self._forming

    def _forming(self, show: Forming) -> None:
        if self.clock() - self._drawn_s >= PERIOD_S and self._is_affordable:
            self._draw(show)

    def finished(self, pixels: Pixels) -> None:
        """Draw the finished picture, and leave it on the screen above the next line."""
        if self._area is not None and (self._area.frame or self._is_affordable):
            self._draw(lambda: pixels)
        if self._area is not None:
            self._area.leave()

    def _draw(self, show: Forming) -> None:
        from tqdm import tqdm

        if self._area is None or self._has_stopped or not self._area.terminal.is_ours:
            return
        began_s = self.clock()
        try:
            pixels = show()
            if pixels is not None:
                with tqdm.external_write_mode(file=sys.stderr):
                    self._area.draw(pixels)
        except (OSError, RuntimeError, ValueError) as error:
            self._stop(self._area, error)
        self._drawn_s = self.clock()
        self._spent_s += self._drawn_s - began_s

    @property
    def _is_affordable(self) -> bool:
        return self._spent_s <= FREE_S + SHARE * (self.clock() - self._began_s)

    def _stop(self, area: PictureArea, error: Exception) -> None:
        """Turn previews off after an error, which must not fail the command."""
        from tqdm import tqdm

        self._has_stopped = True
        with suppress(OSError), tqdm.external_write_mode(file=sys.stderr):
            area.repair()
            area.clear()
        tqdm.write(f"sdxl render: no more previews: {error}", file=sys.stderr)

    def _continued(self, number: int, frame: FrameType | None) -> None:
        """Redraw after Ctrl-Z and `fg`."""
        if self._area is not None:
            self._area.has_moved = True
