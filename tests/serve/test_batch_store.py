"""The store of files and batches: sweeps, full disks, and two runners."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from sdxl.files import OutputError
from serve.batch.lock import locked
from serve.batch_api.records import FILES, BatchRecord, FileRecord, Records
from serve.batch_api.runner import SWEEP_S, BatchRunner, sweep
from tests.serve.test_batch_api import batch_api, line
from tests.waiting import wait_until


def test_unfinished_files_of_a_killed_front_are_removed_after_a_day(tmp_path: Path) -> None:
    records, day_s = Records(str(tmp_path)), 24 * 3600
    records.prepare()
    (scratch,) = (tmp_path / "tmp").iterdir()
    old, new = scratch / ".old.tmp", scratch / ".new.tmp"
    for path, age_s in ((old, day_s + 60), (new, day_s - 60)):
        path.write_bytes(b"of an upload")
        os.utime(path, (time.time() - age_s,) * 2)
    sweep(records, int(time.time()))
    assert not old.exists() and new.exists()
    sweep(records, int(time.time()) + 2 * day_s)
    records.store.put("data/file", b"x")
    assert records.data("file") == b"x" and not new.exists()


def test_an_upload_whose_record_does_not_fit_on_the_disk_leaves_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, full = Records(str(tmp_path)), OSError(errno.ENOSPC, "No space left on device")
    records.prepare()
    put = records.store.put

    def put_before_it_is_full(name: str, data: bytes) -> None:
        if not name.startswith("data/"):
            raise OutputError(Path(name), full)
        put(name, data)

    monkeypatch.setattr(records.store, "put", put_before_it_is_full)
    file = FileRecord(f"file-{0:032}", "x", "batch", 5, 0, 1, 0.0)
    with pytest.raises(OutputError, match="No space"):
        records.add_file("anybody", file, b"hello")
    assert records.store.names("data") == []


def test_data_that_a_crash_left_without_a_record_are_removed_by_the_second_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with batch_api(tmp_path) as api:
        api.runner.close()
        deleted, kept = (api.upload(line(name)) for name in "ab")
        runner = BatchRunner(api.runner.records, api.settings, lambda: [api.worker])
        records = runner.records
        file = records.read(FileRecord, "anybody", deleted.id)
        assert file is not None
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(records, "drop_data", crash)
            records.drop_file("anybody", file)
        uploaded = replace(file, id=f"file-{1:032}")
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(records, "_put", crash)
            records.add_file("anybody", uploaded, b"{}")
        data = set(records.store.names("data"))
        assert data == {deleted.id, uploaded.id, kept.id}
        runner.poll()
        assert set(records.store.names("data")) == data, "a record may still be written"
        runner.clock = lambda: time.time() + SWEEP_S + 1
        runner.poll()
        assert records.store.names("data") == [kept.id]


def test_a_batch_that_ends_during_a_sweep_keeps_its_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with batch_api(tmp_path) as api:
        output = api.ended(api.begin(line("a"))).output_file_id
        api.runner.close()
        records, ids, listed = api.runner.records, Records.ids, list[str]()
        (batch,) = records.read_all(BatchRecord, "anybody")
        file = records.read(FileRecord, "anybody", output)
        assert file is not None
        records.put(replace(batch, status="in_progress", ended_at=None))
        records.drop_file("anybody", file)

        def ids_before_the_end(records: Records, folder: str, owner: str) -> list[str]:
            found = ids(records, folder, owner)
            listed.append(folder)
            if len(listed) == 2:
                records.add_file(owner, file)
                records.put(batch)
            return found

        monkeypatch.setattr(Records, "ids", ids_before_the_end)
        sweep(records, int(time.time()))
        assert listed[0] == FILES and len(api.lines(output)) == 1


def test_the_reader_of_a_kind_of_record_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, records, init = list[type](), Records(str(tmp_path)), TypeAdapter.__init__

    def make(adapter: TypeAdapter[Any], kind: Any) -> None:
        made.append(kind)
        init(adapter, kind)

    monkeypatch.setattr(TypeAdapter, "__init__", make)
    records.prepare()
    for number in range(3):
        records.add_file("anybody", FileRecord(f"file-{number:032}", "x", "batch", 5, 0, 1, 0.0))
    assert len(records.read_all(FileRecord, "anybody")) == 3 and len(made) <= 1


def test_the_event_loop_reads_no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, in_loop = Records.asked_to_cancel, list[str]()

    def asked_to_cancel(records: Records, id_: str) -> int | None:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            in_loop.append(id_)
        return read(records, id_)

    monkeypatch.setattr(Records, "asked_to_cancel", asked_to_cancel)
    with batch_api(tmp_path) as api:
        batch = api.ended(api.begin(line("a")))
        assert api.client.batches.list().data == [batch] and not in_loop


def test_on_a_full_disk_other_batches_and_the_sweep_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with batch_api(tmp_path) as api:
        old = api.upload(line("old"))
        api.runner.close()
        stuck, other = api.begin(line("a")), api.begin(line("b"))
        runner = BatchRunner(api.runner.records, api.settings, lambda: [api.worker])
        kept, checked = runner.records.store, list[str]()

        def keep(records: Records, batch: BatchRecord) -> None:
            checked.append(batch.id)
            raise OutputError(tmp_path, OSError(28, "No space left on device"))

        monkeypatch.setattr("serve.batch_api.runner.keep_input", keep)
        runner.clock = lambda: time.time() + 40 * 24 * 3600
        runner.poll()
        assert checked == [stuck.id, other.id]
        assert old.id not in kept.names("data"), "an expired file was not removed"


def test_a_second_runner_does_not_end_a_batch_again(tmp_path: Path) -> None:
    events = list[BatchRecord]()
    outbox: Any = SimpleNamespace(add=events.append)
    with batch_api(tmp_path) as api:
        api.runner.close()
        begun = api.begin(line("a"))
        records, settings = api.runner.records, api.settings
        first, second = (
            BatchRunner(records, settings, lambda: [api.worker], outbox) for _ in range(2)
        )
        first.poll()
        with locked(records.job_place(begun.id)):
            # As after the replacement of a service: both have begun, and another process has the
            # lock.
            second.poll()
            first.poll()
            (batch,) = records.read_all(BatchRecord, "anybody")
            ended = replace(batch, status="cancelled", ended_at=7, finalizing_at=7)
            records.put(ended)
        wait_until(lambda: not first._turns and not second._turns)
        assert records.read_all(BatchRecord, "anybody") == [ended] and not events
