"""What stops a job in one line, and what is left so that it goes on later."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdxl.files import OutputError, write_atomic
from sdxl.params import InvalidParams
from serve.batch import command, store
from serve.batch.batch_spec import BatchFailed
from serve.batch.renderers import RendererLost
from tests.serve.batch.drawers import SMALL, Drawer, dead_letters, lines_of, make, pictures, prompts


def failing(number: int, fail_after: int) -> Callable[..., None]:
    """A disk that takes so many files, and then says no."""
    taken, write = 0, write_atomic

    def put(path: Path, data: bytes, scratch: Path | None = None) -> None:
        nonlocal taken
        taken += path.parent.parent.name == "images"
        if taken > fail_after:
            raise OutputError(path, OSError(number, os.strerror(number)))
        write(path, data, scratch)

    return put


@pytest.mark.parametrize("number", [28, 30, 122], ids=["disk full", "read-only", "quota"])
def test_an_output_that_takes_no_more_stops_the_job_in_one_line_and_it_goes_on_later(
    number: int, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = prompts(tmp_path, 30), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_atomic", failing(number, 11))
        with pytest.raises((BatchFailed, OutputError), match=os.strerror(number)) as caught:
            make(source, out, *SMALL)
    assert "\n" not in str(caught.value)
    log = tmp_path / "log"
    assert make(source, out, *SMALL, load=partial(Drawer, str(log))) == 0
    assert pictures(out) == pictures(finished / "out")
    assert len(lines_of(log)) <= 30 - 11 + 8, "what was in the ledger was made again"


class Vanishing(Drawer):
    """The output folder goes while it draws."""

    out: Path
    after: int = 12

    async def _misbehave(self, prompt: str) -> None:
        if self.made == self.after and self.out.exists():
            self.out.rename(self.out.with_name("gone"))


def test_an_output_folder_that_vanishes_stops_the_job_and_is_not_made_again(
    finished: Path, tmp_path: Path
) -> None:
    source, out = prompts(tmp_path, 30), tmp_path / "out"

    def load() -> Drawer:
        drawer = Vanishing(draw_s=0.01)
        drawer.out = out
        return drawer

    with pytest.raises((BatchFailed, OutputError), match="out: "):
        make(source, out, *SMALL, load=load)
    assert not out.exists(), "it was made again, and would have got half a job"
    (tmp_path / "gone").rename(out)
    assert make(source, out, *SMALL) == 0
    assert pictures(out) == pictures(finished / "out")
    assert command.main(["--verify", str(out)]) == 0


@pytest.mark.slow
def test_two_starts_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    from serve.batch.lock import locked

    with (
        locked(str(tmp_path / "out")),
        pytest.raises(InvalidParams, match="another sdxl batch is at work"),
    ):
        make(prompts(tmp_path, 2), tmp_path / "out")


class Lost(Drawer):
    """Draws two pictures; then its service has another key."""

    async def generate(self, order: Any) -> Any:
        if self.made == 2:
            raise RendererLost("http://there answered 401: A valid API key is needed.")
        async for update in super().generate(order):
            yield update


def test_a_service_that_is_lost_stops_the_job_and_buries_nothing(tmp_path: Path) -> None:
    source, out = prompts(tmp_path, 6), tmp_path / "out"
    with pytest.raises(BatchFailed, match="401: A valid API key.*rerun the same command to resume"):
        make(source, out, load=partial(Lost, window=1))
    assert len(pictures(out)) == 2
    assert make(source, out) == 0
    assert len(pictures(out)) == 6 and not dead_letters(out)
