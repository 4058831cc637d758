"""Failures that stop a job with one line, and resuming after them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdxl.files import OutputError, write_atomic
from sdxl.params import InvalidParams
from serve.batch import command, lock, store
from serve.batch.batch_spec import BatchFailed
from serve.batch.renderers import RendererLost
from tests.serve.batch.drawers import SMALL, Drawer, dead_letters, lines_of, make, pictures, prompts


def test_a_full_disk_stops_the_job_and_a_rerun_resumes(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, taken = prompts(tmp_path, 30), tmp_path / "out", list[Path]()

    def write(path: Path, data: bytes, scratch: Path | None = None) -> None:
        """Write eleven pictures, and then nothing more."""
        if path.parent.parent.name == "images":
            taken.append(path)
        if len(taken) > 11:
            raise OutputError(path, OSError(28, "No space left on device"))
        write_atomic(path, data, scratch)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_atomic", write)
        with pytest.raises((BatchFailed, OutputError), match="No space left") as caught:
            make(source, out, *SMALL)
    assert "\n" not in str(caught.value)
    log = tmp_path / "log"
    assert make(source, out, *SMALL, load=partial(Drawer, str(log))) == 0
    assert pictures(out) == pictures(finished / "out")
    assert len(lines_of(log)) <= 30 - 11 + 8, "what was in the ledger was made again"


@dataclass
class Vanishing(Drawer):
    """Moves the output folder away after 12 pictures."""

    out: Path = Path()

    async def _misbehave(self, prompt: str) -> None:
        if self.made == 12 and self.out.exists():
            self.out.rename(self.out.with_name("gone"))


def test_an_output_folder_that_vanishes_stops_the_job_and_is_not_recreated(
    finished: Path, tmp_path: Path
) -> None:
    source, out = prompts(tmp_path, 30), tmp_path / "out"
    with pytest.raises((BatchFailed, OutputError), match="out must be "):
        make(source, out, *SMALL, load=partial(Vanishing, draw_s=0.01, out=out))
    assert not out.exists()
    (tmp_path / "gone").rename(out)
    assert make(source, out, *SMALL) == 0
    assert pictures(out) == pictures(finished / "out")
    assert command.main(["--verify", str(out)]) == 0


def test_a_second_run_in_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LEAVE_S", 0.3)
    message = "out cannot be used: another sdxl batch writes there"
    with lock.locked(str(tmp_path / "out")), pytest.raises(InvalidParams, match=message):
        make(prompts(tmp_path, 2), tmp_path / "out")


class Lost(Drawer):
    """Its service refuses the key after two pictures."""

    async def generate(self, order: Any) -> Any:
        if self.made == 2:
            raise RendererLost("http://there answered 401: A valid API key is needed.")
        async for update in super().generate(order):
            yield update


def test_a_service_that_refuses_the_key_stops_the_job_without_dead_letters(tmp_path: Path) -> None:
    source, out = prompts(tmp_path, 6), tmp_path / "out"
    with pytest.raises(BatchFailed, match="401: A valid API key.*rerun the same command to resume"):
        make(source, out, load=partial(Lost, window=1))
    assert len(pictures(out)) == 2
    assert make(source, out) == 0
    assert len(pictures(out)) == 6 and not dead_letters(out)
