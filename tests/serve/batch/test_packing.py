"""Finished shards are packed while others are made, however slow the output is."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from sdxl.files import OutputError
from serve.batch import command, running
from serve.batch.store import FolderStore
from serve.batch.tars import Packer
from tests.serve.batch.drawers import Drawer, make, noted, prompts

TARRED = ("--tar", "--shard-size", "4")


class SlowTars(FolderStore):
    """A tar is written once all pictures are made, or so much later. It notes how many were made
    before and after."""

    def __init__(self, root: Path, log: Path, put_s: float, rows: int) -> None:
        super().__init__(root, "run")
        self.log, self.put_s, self.rows = log, put_s, rows
        self.drawn: list[tuple[int, int]] = []

    def put(self, name: str, data: bytes) -> None:
        if name.endswith(".tar"):
            before, until_s = len(noted(self.log)), time.monotonic() + self.put_s
            while time.monotonic() < until_s and len(noted(self.log)) < self.rows:
                time.sleep(0.02)
            self.drawn.append((before, len(noted(self.log))))
        super().put(name, data)


def test_while_one_shard_is_packed_all_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    store = SlowTars(out, log, 8.0, rows=40)
    monkeypatch.setattr(running, "open_store", lambda *_: store)
    load = partial(Drawer, str(log), draw_s=0.05, window=4)
    assert make(prompts(tmp_path, 40), out, *TARRED, load=load) == 0
    before, after = store.drawn[0]
    assert before < 40 and after == 40, store.drawn
    assert command.main(["--verify", str(out)]) == 0


def test_no_worker_is_taken_for_stuck_while_a_shard_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    store = SlowTars(out, log, 1.5, rows=10_000)
    monkeypatch.setattr(running, "open_store", lambda *_: store)
    load = partial(Drawer, str(log), draw_s=0.1, window=4)
    flags = ("--workers", "2", "--stall-s", "1")
    assert make(prompts(tmp_path, 24), out, *TARRED, *flags, load=load) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert max(line.get("lost_workers", 0) for line in said) == 0
    assert len(noted(log)) == 24


class NoRoom(FolderStore):
    def put(self, name: str, data: bytes) -> None:
        if name.endswith("000003.tar"):
            raise OutputError(self.root / name, OSError(28, "No space left on device"))
        super().put(name, data)


def test_a_tar_that_cannot_be_written_stops_the_job_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, log = prompts(tmp_path, 40), tmp_path / "out", tmp_path / "log"
    load = partial(Drawer, str(log), draw_s=0.05, window=4)
    with monkeypatch.context() as patch:
        patch.setattr(running, "open_store", lambda *_: NoRoom(out, "run"))
        with pytest.raises(OutputError, match=r"000003\.tar.*No space left"):
            make(source, out, *TARRED, load=load)
    assert make(source, out, *TARRED, load=load) == 0
    assert len({line.split()[1] for line in noted(log)}) == 40
    assert command.main(["--verify", str(out)]) == 0


def test_who_leaves_waits_for_the_shard_under_way_and_begins_no_more() -> None:
    begun, may_go, packed = threading.Event(), threading.Event(), list[int]()

    def pack(shard: int) -> None:
        begun.set()
        may_go.wait(20)
        packed.append(shard)

    packer = Packer(pack)
    for shard in (3, 1, 2):
        packer.add(shard)
    begun.wait(20)
    assert not packer.is_done()
    threading.Timer(0.1, may_go.set).start()
    packer.leave(20)
    assert packed == [3]


def test_shards_are_packed_in_the_order_they_ended() -> None:
    packed = list[int]()
    packer = Packer(packed.append)
    for shard in (3, 1, 2):
        packer.add(shard)
    until_s = time.monotonic() + 20
    while not packer.is_done() and time.monotonic() < until_s:
        time.sleep(0.01)
    packer.leave(20)
    assert packed == [3, 1, 2]
