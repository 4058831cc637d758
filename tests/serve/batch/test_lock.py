"""One run of a job at a time in an object store."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdxl.params import InvalidParams
from serve.batch import command
from serve.batch import lock as batch_lock
from serve.batch.batch_spec import BatchFailed
from serve.batch.job import open_job
from serve.batch.lock import BucketLock, LockTurn
from serve.batch.progress import STATUS, read_status
from serve.batch.running import run
from serve.batch.store import ObjectStore
from tests.serve.batch.drawers import SMALL, Drawer, in_threads, lines_of, make, order_of, prompts
from tests.serve.services import ROOT
from tests.waiting import wait_until

REFUSED = "out cannot be used: another sdxl batch writes there"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lock, "RENEW_S", 0.1)
    monkeypatch.setattr(batch_lock, "LOOK_S", 0.02)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"memory://{tmp_path.name}")


def test_a_second_run_in_a_bucket_is_refused_and_makes_nothing(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, logs = prompts(tmp_path, 20), [tmp_path / name for name in ("first", "second")]

    def pool(order: Any, job: Any, task: Any) -> Any:
        """Start the second run when the first has begun."""
        with pytest.raises(InvalidParams, match=REFUSED):
            make(source, store.url, *SMALL, load=partial(Drawer, str(logs[1])))
        return in_threads(order, job, task, load=partial(Drawer, str(logs[0])))

    assert run(order_of(source, store.url, *SMALL), pool) == 0
    assert len(lines_of(logs[0])) == 20 and not lines_of(logs[1])
    monkeypatch.setattr(BucketLock, "_watch", lambda *_: pytest.fail("it waits for an ended run"))
    assert make(source, store.url, *SMALL) == 0


def test_a_lock_in_s3_is_exclusive_and_is_released(bucket: str) -> None:
    first, second = BucketLock(ObjectStore(bucket)), BucketLock(ObjectStore(bucket))
    first.take()
    with pytest.raises(InvalidParams, match=f"{REFUSED} .process"):
        BucketLock(ObjectStore(bucket)).take()
    first.check()
    first.leave()
    second.take()
    assert ObjectStore(bucket).names("lock") == ["00000002"]
    second.leave()


def test_create_replaces_no_object(bucket: str, store: ObjectStore) -> None:
    for each in (ObjectStore(bucket), store):
        each.create("lock/1", b"first")
        each.create("lock/1", b"second")
        assert each.get("lock/1") == b"first"


@pytest.mark.slow
def test_a_live_process_refuses_another_and_a_killed_one_is_followed(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, logs = prompts(tmp_path, 40), [tmp_path / name for name in ("first", "second")]
    argv = [sys.executable, "-m", "tests.serve.batch.job_program", "threads", "2", str(logs[0])]
    with subprocess.Popen([*argv, str(source), bucket, *SMALL], cwd=ROOT) as process:
        try:
            wait_until(lambda: len(lines_of(logs[0])) >= 8 or process.poll() is not None)
            with pytest.raises(InvalidParams, match=f"{REFUSED} .process {process.pid} on"):
                make(source, bucket, *SMALL)
        finally:
            process.kill()
    monkeypatch.setattr(batch_lock, "OLD_S", 2.0)
    assert make(source, bucket, *SMALL, load=partial(Drawer, str(logs[1]))) == 0
    assert len({line.split()[1] for log in logs for line in lines_of(log)}) == 40
    assert len(lines_of(logs[1])) < 40, "it resumed"
    assert command.main(["--verify", bucket]) == 0


def test_of_many_runs_after_a_crash_one_takes_the_lock_once_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Atomic(ObjectStore):
        """Creates an object in one step, as S3 does."""

        lock = threading.Lock()

        def create(self, name: str, data: bytes) -> None:
            with self.lock:
                super().create(name, data)

    monkeypatch.setattr(batch_lock, "OLD_S", 0.5)
    store = Atomic(f"memory://{tmp_path.name}")
    crashed = BucketLock(store)
    crashed.take()
    crashed._is_left.set()
    crashed._thread.join()
    began_s, taken, refused = time.monotonic(), list[BucketLock](), list[str]()

    def take() -> None:
        lock = BucketLock(store)
        try:
            lock.take()
            taken.append(lock)
        except InvalidParams as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and len(refused) == 7, refused
    assert time.monotonic() - began_s >= 0.5
    assert "waiting 0.5 s for a sign of life" in caplog.text
    taken[0].check()
    taken[0].leave()


def test_a_suspended_run_stops_after_another_took_over(store: ObjectStore, tmp_path: Path) -> None:
    source, log, follower = prompts(tmp_path, 40), tmp_path / "log", BucketLock(store)

    def pool(order: Any, job: Any, task: Any) -> Any:
        """Take over the lock when the first run has begun."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BucketLock, "_watch", lambda *_: None)
            follower.take()
        return in_threads(order, job, task, load=partial(Drawer, str(log), draw_s=0.2, window=1))

    with pytest.raises(BatchFailed, match="process .* took over the job"):
        run(order_of(source, store.url, *SMALL), pool)
    assert len(lines_of(log)) < 40
    follower.check()
    follower.leave()


def test_a_store_that_is_unreachable_for_a_while_costs_no_lock(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(*_: object) -> None:
        raise ConnectionError("no route")

    lock = BucketLock(store)
    lock.take()
    with monkeypatch.context() as patch:
        patch.setattr(store, "names", unreachable)
        wait_until(lambda: "cannot renew the lock (no route)" in caplog.text)
    before = lock._turn.renewals
    wait_until(lambda: lock._turn.renewals > before)
    lock.check()
    lock.leave()


def test_a_run_whose_job_was_removed_stops_and_writes_nothing(store: ObjectStore) -> None:
    lock = BucketLock(store)
    lock.take()
    store.remove_all()
    wait_until(lambda: lock._lost)
    with pytest.raises(BatchFailed, match="was removed"):
        lock.check()
    lock.leave()
    assert not store.names("lock")


@pytest.mark.parametrize("refuses", [True, False])
def test_in_a_store_without_conditional_creation_the_earlier_of_two_runs_stops(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    original = type(store.files).pipe_file

    def pipe_file(self: Any, path: str, data: bytes, mode: str = "overwrite") -> None:
        if refuses and mode == "create":
            raise OSError(38, "NotImplemented")
        original(self, path, data)

    monkeypatch.setattr(type(store.files), "pipe_file", pipe_file)
    first, second = BucketLock(store), BucketLock(store)
    first.take()
    with pytest.raises(InvalidParams, match=REFUSED):
        BucketLock(store).take()
    with monkeypatch.context() as patch:
        # Both checked before either wrote.
        patch.setattr(second, "last", lambda: (0, None))
        patch.setattr(store, "create", store.put)
        second.take()
    wait_until(lambda: first._lost)
    first.leave()
    second.check()
    second.leave()


def test_a_killed_job_in_a_bucket_is_broken_off_at_once_on_its_own_machine(tmp_path: Path) -> None:
    out, here = f"memory://{tmp_path.name}", socket.gethostname()
    assert make(prompts(tmp_path, 2), out) == 0
    store, job = open_job(out)
    status = json.loads(store.get(STATUS)) | {"state": "running", "at": time.time()}
    store.put(STATUS, json.dumps(status).encode())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    states = []
    for turn in (
        LockTurn("a", here, os.getpid()),
        LockTurn("a", "elsewhere", ended.pid),
        LockTurn("a", here, ended.pid),
        LockTurn("a", "elsewhere", ended.pid, is_over=True),
    ):
        store.put("lock/00000009", turn.as_json())
        states.append(read_status(store, job)["state"])
    assert states == ["running", "running", "broken off", "broken off"]
