"""A real terminal: xterm, on its own screen, shows sixels where they were drawn."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from serve.render.terminal_pictures import fitted
from tests.serve.services import ROOT
from tests.serve.terminals import environment_with
from tests.serve.test_terminal_pictures import difference, scene
from tests.tools import tool
from tests.waiting import wait_until

SOON_S = 100.0
BORDER = 2
"""pixels between the window's edge and the first cell, including the frame's"""

SHOW = """
import os, sys, time
import numpy as np
from PIL import Image
from serve.render import terminal
from serve.render.progress_display import RenderDisplay
from tqdm import tqdm

pixels = np.asarray(Image.open(sys.argv[1]))
found = terminal.find("auto", False)
print("first line")
with RenderDisplay(20, found) as display:
    for shade in (50, 150):
        time.sleep(0.3)
        display.ticked(1)
        if display.on_forming is not None:
            display.on_forming(lambda: np.full_like(pixels, shade))
    display.finished(pixels)
    tqdm.write("a.png")
with open(sys.argv[2] + ".part", "w") as file:
    print(*(found and (found.protocol, found.colours, *found.screen.cell) or ["none"]), file=file)
os.rename(sys.argv[2] + ".part", sys.argv[2])
time.sleep(100)
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture
def display(tmp_path: Path) -> Iterator[str]:
    """Yield the number of a display whose pixels are in a file."""
    reading, writing = os.pipe()
    flags = ["-displayfd", str(writing), "-screen", "0", "700x400x24", "-fbdir", str(tmp_path)]
    server = subprocess.Popen(
        [tool("Xvfb", "xvfb"), *flags], pass_fds=[writing], stderr=subprocess.DEVNULL
    )
    os.close(writing)
    try:
        with open(reading) as number:
            yield f":{number.readline().strip()}"
    finally:
        server.terminate()
        server.wait()


def run_xterm(display: str, folder: Path, *flags: str) -> tuple[list[str], NDArray[np.uint8]]:
    """Return the program's output, and the screen after everything is drawn."""
    file, report = folder / "scene.png", folder / "said"
    scene(120, 120).save(file)
    command = [sys.executable, "-c", SHOW, str(file), str(report)]
    xterm = subprocess.Popen(
        [tool("xterm", "xterm"), *flags, "-geometry", "80x20+0+0", "-e", *command],
        env={**environment_with({}), "DISPLAY": display},
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: report.exists() or xterm.poll() is not None, SOON_S)
        return report.read_text().split(), settled(folder / "Xvfb_screen0")
    finally:
        xterm.terminate()
        xterm.wait()


def settled(file: Path) -> NDArray[np.uint8]:
    """Return the screen when it stops changing."""
    before = pixels_of(file)
    while True:
        time.sleep(1.0)
        now = pixels_of(file)
        if (now == before).all():
            return now
        before = now


def pixels_of(file: Path) -> NDArray[np.uint8]:
    """Read a dump of a window: big-endian numbers, colours of 12 bytes, rows of pixels in BGRX."""
    data = file.read_bytes()
    numbers = struct.unpack(">25I", data[:100])
    head, width, height, row, colours = (numbers[at] for at in (0, 4, 5, 12, 19))
    start = head + 12 * colours
    rows = np.frombuffer(data, np.uint8, row * height, start).reshape(height, row)
    return rows[:, : 4 * width].reshape(height, width, 4)[:, :, 2::-1]


@pytest.mark.parametrize(("registers", "most"), [(256, 6.0), (16, 30.0)])
def test_xterm_shows_the_picture_above_its_line(
    registers: int, most: float, display: str, tmp_path: Path
) -> None:
    flags = ["-ti", "vt340", "-xrm", f"XTerm*numColorRegisters: {registers}"]
    report, screen = run_xterm(display, tmp_path, *flags)
    protocol, colours, *cell = report
    assert (protocol, int(colours)) == ("sixel", registers)
    width, height = map(int, cell)
    top, left, side = BORDER + 1 + height, BORDER + 1, 12 * height
    shown = Image.fromarray(screen[top : top + side, left : left + side].copy())
    expected = fitted(scene(120, 120), (side, side))
    assert difference(shown, expected) < most
    below = screen[top + side : top + side + height, left : left + 6 * width]
    assert (below == 0).any() and (below == 255).any(), "its line, in black on white"


def test_xterm_without_sixels_gets_the_bar_alone(display: str, tmp_path: Path) -> None:
    report, screen = run_xterm(display, tmp_path, "-ti", "vt220")
    assert report == ["none"]
    is_grey = (screen[:, :, 0] == screen[:, :, 1]) & (screen[:, :, 1] == screen[:, :, 2])
    assert is_grey.all(), "nothing but black letters on white"
