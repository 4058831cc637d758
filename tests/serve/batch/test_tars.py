"""Tar shards: how they are packed, read and resumed."""

from __future__ import annotations

import hashlib
import tarfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from sdxl.files import OutputError
from sdxl.handover import in_threads
from serve.batch import command, ledger, running
from serve.batch.ledger import Entry
from serve.batch.store import FolderStore
from serve.batch.tars import LOOSE, Packer, pack, reader
from tests.serve.batch.drawers import (
    SMALL,
    Drawer,
    jsonl,
    lines_of,
    make,
    pictures,
    prompts,
)
from tests.waiting import wait_until

TARRED = ("--tar", "--shard-size", "4")
SHARD = "000000"


def test_tar_shards_hold_the_same_pictures_and_resume(finished: Path, tmp_path: Path) -> None:
    source, out, log = prompts(tmp_path, 30), tmp_path / "out", tmp_path / "log"
    assert make(source, out, *SMALL, "--tar") == 0
    before = pictures(out)
    assert sorted(before) == [f"00000{i}.tar" for i in range(4)]
    with tarfile.open(out / "images" / "000000.tar") as tar:
        names = tar.getnames()
        inside = {name: tar.extractfile(name).read() for name in names}  # type: ignore[union-attr]
    assert [Path(name).suffix for name in names] == [".png", ".json"] * 8
    singles = set(pictures(finished / "out").values())
    assert all(data in singles for name, data in inside.items() if name.endswith(".png"))
    assert command.main(["--verify", str(out)]) == 0
    (out / "images" / "000002.tar").write_bytes(b"damaged")
    assert make(source, out, *SMALL, "--tar", load=partial(Drawer, str(log))) == 0
    assert len(lines_of(log)) == 8 and pictures(out) == before
    assert command.main(["--verify", str(out)]) == 0 and not list(out.glob("loose/*/*"))


def test_long_ids_and_ids_of_dots_have_valid_names_in_a_tar(tmp_path: Path) -> None:
    ids = ["x" * 97, "红色圆圈在蓝色背景上面呢", "красный круг на синем фоне"]
    ids += ["x" + "." * 150, "x" + "." * 151]
    out, rows = tmp_path / "out", [{"prompt": "a circle", "id": id_} for id_ in ids]
    assert make(jsonl(tmp_path, rows), out, "--tar") == 0
    with tarfile.open(out / "images" / "000000.tar") as tar:
        names = tar.getnames()
    assert len(set(names)) == 2 * len(ids) and max(map(len, names)) <= 255
    assert command.main(["--verify", str(out)]) == 0


class DistantStore(FolderStore):
    """Answers slowly, and counts the requests and the concurrent requests."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "run")
        self.asked, self.most = Counter[str](), Counter[str]()
        self._open, self._lock = Counter[str](), threading.Lock()
        self.prepare("images", "ledger", LOOSE)

    def get(self, name: str) -> bytes:
        self._wait("get", name)
        return super().get(name)

    def remove(self, name: str) -> None:
        self._wait("remove", name)
        super().remove(name)

    def _wait(self, what: str, name: str) -> None:
        with self._lock:
            self.asked[name] += 1
            self._open[what] += 1
            self.most[what] = max(self.most[what], self._open[what])
        time.sleep(0.01)
        with self._lock:
            self._open[what] -= 1


def test_many_threads_make_a_tar_and_one_reads_it(tmp_path: Path) -> None:
    store = DistantStore(tmp_path)
    appender = store.append(SHARD)
    for i in range(24):
        data, file = f"picture {i}".encode(), f"{LOOSE}/{SHARD}/{i}.png"
        store.put(file, data)
        digest, params = hashlib.sha256(data).hexdigest(), {"prompt": "a"}
        entry = Entry(i, str(i), f"line {i}", "run", file, digest, len(data), params=params)
        appender.add(entry.as_line())
    appender.close()
    pack(store, 0, "run")
    assert store.names(f"{LOOSE}/{SHARD}") == []
    assert store.most["get"] > 1 and store.most["remove"] > 1
    packed = ledger.in_order(ledger.read(store, SHARD).values())
    read = in_threads(reader(store), [entry.file for entry in packed], 8)
    assert list(read) == [f"picture {i}".encode() for i in range(24)]
    assert store.asked[f"images/{SHARD}.tar"] == 1


# -- the packer -----------------------------------------------------------------------------


class SlowTars(FolderStore):
    """Writes a tar only after all pictures are made, and records how many were made before."""

    def __init__(self, root: Path, log: Path, rows: int) -> None:
        super().__init__(root, "run")
        self.log, self.rows = log, rows
        self.before: list[int] = []

    def put(self, name: str, data: bytes) -> None:
        if name.endswith(".tar"):
            self.before.append(len(lines_of(self.log)))
            wait_until(lambda: len(lines_of(self.log)) >= self.rows)
        super().put(name, data)


def test_while_one_shard_is_packed_all_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    store = SlowTars(out, log, rows=40)
    monkeypatch.setattr(running, "open_store", lambda *_: store)
    load = partial(Drawer, str(log), draw_s=0.02, window=4)
    assert make(prompts(tmp_path, 40), out, *TARRED, load=load) == 0
    assert store.before[0] < 40
    assert command.main(["--verify", str(out)]) == 0


class FullDisk(FolderStore):
    def put(self, name: str, data: bytes) -> None:
        if name.endswith("000003.tar"):
            raise OutputError(self.root / name, OSError(28, "No space left on device"))
        super().put(name, data)


def test_a_tar_that_cannot_be_written_stops_the_job_and_the_next_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, log = prompts(tmp_path, 40), tmp_path / "out", tmp_path / "log"
    load = partial(Drawer, str(log), draw_s=0.02, window=4)
    with monkeypatch.context() as patch:
        patch.setattr(running, "open_store", lambda *_: FullDisk(out, "run"))
        with pytest.raises(OutputError, match=r"000003\.tar.*No space left"):
            make(source, out, *TARRED, load=load)
    assert make(source, out, *TARRED, load=load) == 0
    assert len({line.split()[1] for line in lines_of(log)}) == 40
    assert command.main(["--verify", str(out)]) == 0


def test_a_packer_packs_in_order_and_on_leaving_finishes_only_the_current_shard() -> None:
    begun, may_end, packed = threading.Event(), threading.Event(), list[int]()

    def pack(shard: int) -> None:
        packed.append(shard)
        if len(packed) == 3:
            begun.set()
            may_end.wait(20)

    packer = Packer(pack)
    for shard in (3, 1):
        packer.add(shard)
    wait_until(packer.is_done)
    for shard in (2, 5, 4):
        packer.add(shard)
    begun.wait(20)
    assert not packer.is_done()
    threading.Timer(0.1, may_end.set).start()
    packer.leave(20)
    assert packed == [3, 1, 2] and packer._packed == 3
