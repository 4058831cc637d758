"""The real `sdxl render` command in a terminal, on the embedded model."""

from __future__ import annotations

import os
import subprocess
import termios
from pathlib import Path

import pytest
from PIL import Image

from serve.render.terminal_pictures import fitted
from tests.serve.terminals import ATTRIBUTES, run_in
from tests.serve.terminals import terminal as double
from tests.serve.test_terminal_pictures import difference
from tests.waiting import wait_until

RENDER = ["-m", "sdxl.cli", "render", "a red circle on a blue background", "--seed", "7"]
NAME = "a-red-circle-on-a-blue-background-7.png"
SOON_S = 100.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the file that is made without a terminal."""
    out = tmp_path_factory.mktemp("plain")
    with double("kitty") as there:
        process = run_in(there, *RENDER, "--out", str(out), "--preview", "off")
        assert process.wait(SOON_S) == 0
        there.settle()
        assert b"/20 [" in there.output and ATTRIBUTES not in there.output
    return (out / NAME).read_bytes()


@pytest.mark.parametrize("kind", ["kitty", "sixel", "silent"])
def test_the_picture_forms_where_it_can_and_is_the_same_everywhere(
    kind: str, plain: bytes, tmp_path: Path
) -> None:
    protocol = None if kind == "silent" else kind
    with double(kind) as there:
        modes = there.modes
        assert run_in(there, *RENDER, "--out", str(tmp_path)).wait(SOON_S) == 0
        assert there.modes == modes
        display = there.display()
    assert (tmp_path / NAME).read_bytes() == plain
    assert b"/20 [" in there.output
    assert {each.protocol for each in display.drawn} == ({protocol} if protocol else set())
    # On a busy machine, slow work is named above.
    *above, line = display.text
    assert all(each.startswith("sdxl render: ") for each in above), above
    assert line.startswith(f"{tmp_path / NAME}  seed 7")
    if protocol:
        assert len({each.line for each in display.drawn}) == 1 and len(display.drawn) > 1
        with Image.open(tmp_path / NAME) as picture:
            assert difference(display.drawn[-1].picture, fitted(picture, (240, 240))) < 3


def test_with_its_output_in_a_pipe_nothing_is_drawn(tmp_path: Path) -> None:
    with double("kitty") as there:
        process = run_in(there, *RENDER, "--out", str(tmp_path), stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=SOON_S)
        assert output.decode().startswith(str(tmp_path / NAME))
        assert not there.display().drawn and ATTRIBUTES not in there.output


def test_ctrl_c_leaves_the_terminal_whole(tmp_path: Path) -> None:
    with double("sixel") as there:
        # The echo of Ctrl-C would appear in the middle of a picture.
        modes = there.modes
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(there.slave, termios.TCSANOW, modes)
        process = run_in(there, *RENDER, "--steps", "1000", "--out", str(tmp_path))
        wait_until(lambda: there.output.count(b"\x1bP0;1;0q") >= 3, SOON_S)
        there.type(b"\x03")
        assert process.wait(SOON_S) == 130
        assert there.modes == modes
        os.write(there.slave, b"$ ls\n")
        display = there.display()
    assert not display.unfinished and display.text[-1] == "$ ls" and display.column == 0
    assert not display.drawn and not list(tmp_path.iterdir())
