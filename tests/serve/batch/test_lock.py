"""One start of a job at a time in an object store."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdxl.params import InvalidParams
from serve.batch import command
from serve.batch import lock as batch_lock
from serve.batch.batch_spec import BatchFailed
from serve.batch.job import need_job
from serve.batch.lock import BucketLock, LockTurn
from serve.batch.progress import STATUS, read_status
from serve.batch.running import run
from serve.batch.store import ObjectStore
from tests.serve.batch.drawers import SMALL, Drawer, in_threads, make, noted, order_of, prompts
from tests.serve.services import ROOT

REFUSED = "another sdxl batch is at work there"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lock, "RENEW_S", 0.1)
    monkeypatch.setattr(batch_lock, "LOOK_S", 0.02)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"memory://{tmp_path.name}")


@pytest.fixture
def ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is soon old."""
    monkeypatch.setattr(batch_lock, "OLD_S", 0.5)


def crash(lock: BucketLock) -> None:
    """It renews no more, and did not leave."""
    lock._is_left.set()
    lock._thread.join()


def becomes_lost(lock: BucketLock) -> bool:
    until_s = time.monotonic() + 20
    while not lock._lost and time.monotonic() < until_s:
        time.sleep(0.02)
    return bool(lock._lost)


def test_a_second_start_in_a_bucket_is_refused_and_makes_nothing(tmp_path: Path) -> None:
    place, source = f"memory://{tmp_path.name}-two", prompts(tmp_path, 20)
    logs = [tmp_path / name for name in ("first", "second")]

    @contextmanager
    def pool(order: Any, job: Any, task: Any) -> Iterator[Any]:
        """When the first has begun, and before its first picture."""
        with pytest.raises(InvalidParams, match=REFUSED):
            make(source, place, *SMALL, load=partial(Drawer, str(logs[1])))
        with in_threads(order, job, task, load=partial(Drawer, str(logs[0]))) as workers:
            yield workers

    assert run(order_of(source, place, *SMALL), pool) == 0
    assert len(noted(logs[0])) == 20 and not noted(logs[1])
    began_s = time.monotonic()
    assert make(source, place, *SMALL) == 0
    assert time.monotonic() - began_s < batch_lock.OLD_S / 2, "one that ended holds nobody up"


def test_in_a_bucket_of_s3_too(bucket: str) -> None:
    first = BucketLock(ObjectStore(bucket))
    first.take()
    with pytest.raises(InvalidParams, match=f"{REFUSED} .process"):
        BucketLock(ObjectStore(bucket)).take()
    first.check()
    first.leave()
    second = BucketLock(ObjectStore(bucket))
    second.take()
    assert ObjectStore(bucket).names("lock") == ["00000002"]
    second.leave()


def test_what_is_there_is_not_created_again(bucket: str, store: ObjectStore) -> None:
    for each in (ObjectStore(bucket), store):
        each.create("lock/1", b"first")
        each.create("lock/1", b"second")
        assert each.get("lock/1") == b"first"


def test_after_a_crash_the_next_waits_until_the_lock_is_old(
    store: ObjectStore, ends_early: None, caplog: pytest.LogCaptureFixture
) -> None:
    killed, following = BucketLock(store), BucketLock(store)
    killed.take()
    crash(killed)
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        following.take()
    assert time.monotonic() - began_s >= 0.5
    assert "waiting 0.5 s for a sign of life" in caplog.text
    following.leave()


@pytest.mark.slow
def test_a_process_at_work_refuses_another_and_once_killed_is_followed(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, logs = prompts(tmp_path, 100), [tmp_path / name for name in ("first", "second")]
    argv = [sys.executable, "-m", "tests.serve.batch.killed", "threads", "2", str(logs[0])]
    with subprocess.Popen([*argv, str(source), bucket, *SMALL], cwd=ROOT) as process:
        try:
            while len(noted(logs[0])) < 8:
                assert process.poll() is None
                time.sleep(0.05)
            with pytest.raises(InvalidParams, match=f"{REFUSED} .process {process.pid} on"):
                make(source, bucket, *SMALL)
        finally:
            process.kill()
    monkeypatch.setattr(batch_lock, "OLD_S", 2.0)
    assert make(source, bucket, *SMALL, load=partial(Drawer, str(logs[1]))) == 0
    assert len({line.split()[1] for line in noted(logs[0]) + noted(logs[1])}) == 100
    assert len(noted(logs[1])) < 100, "it went on with what was there"
    assert command.main(["--verify", bucket]) == 0


def test_of_many_that_wait_one_goes_on(tmp_path: Path, ends_early: None) -> None:
    """Of a store that creates one object in one step, as S3 does."""

    class Atomic(ObjectStore):
        lock = threading.Lock()

        def create(self, name: str, data: bytes) -> None:
            with self.lock:
                super().create(name, data)

    store = Atomic(f"memory://{tmp_path.name}")
    killed = BucketLock(store)
    killed.take()
    crash(killed)
    taken, refused = list[BucketLock](), list[str]()

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
    taken[0].check()
    taken[0].leave()


def test_who_slept_through_it_stops(store: ObjectStore, ends_early: None, tmp_path: Path) -> None:
    source, log = prompts(tmp_path, 40), tmp_path / "log"
    followers = list[BucketLock]()

    @contextmanager
    def pool(order: Any, job: Any, task: Any) -> Iterator[Any]:
        """When the first has begun, somebody takes it for dead."""
        followers.append(BucketLock(store))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BucketLock, "_watch", lambda *_: None)
            followers[0].take()
        load = partial(Drawer, str(log), draw_s=0.2, window=1)
        with in_threads(order, job, task, load=load) as workers:
            yield workers

    with pytest.raises(BatchFailed, match="process .* took over the job"):
        run(order_of(source, store.url, *SMALL), pool)
    assert len(noted(log)) < 40
    followers[0].check()
    followers[0].leave()


def test_a_store_that_is_away_for_a_while_costs_no_lock(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = BucketLock(store)
    lock.take()

    def away(*_: object) -> None:
        raise ConnectionError("no route")

    with monkeypatch.context() as patch:
        patch.setattr(store, "names", away)
        time.sleep(0.3)
    assert "cannot renew the lock (no route)" in caplog.text
    before = lock._turn.renewals
    while lock._turn.renewals == before:
        time.sleep(0.02)
    lock.check()
    lock.leave()


def test_one_whose_job_was_removed_stops_and_makes_nothing_again(store: ObjectStore) -> None:
    lock = BucketLock(store)
    lock.take()
    store.remove_all()
    assert becomes_lost(lock)
    with pytest.raises(BatchFailed, match="was removed"):
        lock.check()
    lock.leave()
    assert not store.names("lock")


@pytest.mark.parametrize("refuses", [True, False])
def test_a_store_that_cannot_create_without_replacing(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """Two that begin in the same moment: who wrote first finds out."""
    files, _ = store._open()
    kept = type(files).pipe_file

    def pipe_file(self: Any, path: str, data: bytes, mode: str = "overwrite") -> None:
        if refuses and mode == "create":
            raise OSError(38, "NotImplemented")
        kept(self, path, data)

    monkeypatch.setattr(type(files), "pipe_file", pipe_file)
    first, second = BucketLock(store), BucketLock(store)
    first.take()
    with pytest.raises(InvalidParams, match=REFUSED):
        BucketLock(store).take()
    with monkeypatch.context() as patch:
        # As it was asked before the first had written; then both write.
        patch.setattr(second, "last", lambda: (0, None))
        patch.setattr(store, "create", store.put)
        second.take()
    assert becomes_lost(first)
    first.leave()
    second.check()
    second.leave()


def test_a_job_in_a_bucket_that_was_killed_is_broken_off_at_once(tmp_path: Path) -> None:
    """Its holder's process is no more. Of another machine's, silence alone tells."""
    out = f"memory://{tmp_path.name}"
    assert make(prompts(tmp_path, 2), out) == 0
    store = ObjectStore(out)
    job = need_job(store, out)
    status = json.loads(store.get(STATUS)) | {"state": "running", "at": time.time()}
    store.put(STATUS, json.dumps(status).encode())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    states = []
    for turn in (
        LockTurn("a", socket.gethostname(), os.getpid()),
        LockTurn("a", "elsewhere", ended.pid),
        LockTurn("a", socket.gethostname(), ended.pid),
        LockTurn("a", "elsewhere", ended.pid, is_over=True),
    ):
        store.put("lock/00000009", turn.as_json())
        states.append(read_status(store, job)["state"])
    assert states == ["running", "running", "broken off", "broken off"]
