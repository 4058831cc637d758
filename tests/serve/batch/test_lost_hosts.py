"""Lost, cut-off and idle workers, simulated; tests/serve/test_several_hosts.py has real hosts."""

from __future__ import annotations

import asyncio
import itertools
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from sdxl.params import GenerationParams
from serve.batch import shard_worker
from serve.batch.driver import LOAD_S, LOADS, Driver
from serve.batch.progress import BatchProgress
from serve.batch.rows import BatchRow, ShardPiece
from serve.batch.shard_worker import BatchTask, ShardWorker
from serve.batch.store import FolderStore
from serve.batch.workers import StartWorker
from serve.orders import ModelCard
from tests.serve.batch.drawers import Drawer, IdleWorker


class SlowDisk(FolderStore):
    put_s: float

    def put(self, name: str, data: bytes) -> None:
        time.sleep(self.put_s)
        super().put(name, data)


@pytest.mark.parametrize(("draw_s", "put_s"), [(0.3, 0.0), (0.0, 0.3)])
def test_a_worker_without_its_driver_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw_s: float, put_s: float
) -> None:
    """The driver may lease the rows to another worker while a picture is drawn or written."""
    monkeypatch.setattr(shard_worker, "UNHEARD_S", 0.1)
    monkeypatch.setattr(shard_worker, "BEAT_S", 0.05)
    store = SlowDisk(tmp_path, "run")
    store.put_s = put_s
    store.prepare("images", "ledger")
    params = GenerationParams(prompt="a", seed=1, width=64, height=64, steps=2)
    rows = tuple(BatchRow(i, f"line {i}", f"r{i}", params) for i in range(4))

    def written() -> int:
        return store.ledger("000000").count(b"\n")

    async def scenario() -> None:
        worker = ShardWorker(lambda: Drawer(draw_s=draw_s), BatchTask(store, "run", "png"), "w0")
        await worker.turn({0: ShardPiece(0, rows)})
        await asyncio.sleep(0.6)
        assert written() == 0
        while not (await worker.turn({})).ended:
            pass
        assert written() == len(rows)
        await worker.close()

    asyncio.run(scenario())


def lost_workers(start: StartWorker, folder: Path) -> int:
    """Drive two workers until the 51st check finds all shards packed; count the lost workers. Each
    reading of the clock advances it by half of a worker's time to load."""
    progress, beats = BatchProgress(0, 0.0), iter([False] * 50 + [True])
    driver = Driver(
        start,
        2,
        BatchTask(FolderStore(folder, "run"), "run", "png"),
        progress,
        on_card=lambda card: None,
        show=lambda progress: None,
        is_packed=lambda: next(beats),
        clock=(LOAD_S / 2 * i for i in itertools.count()).__next__,
    )
    driver.run(iter([]))
    return progress.lost_workers


class HalfCluster(IdleWorker):
    """A cluster that lost a GPU, for which the second worker waits for ever."""

    def ready(self) -> Future[ModelCard]:
        return super().ready() if self.name == "w0" else Future()


def test_a_lost_gpu_does_not_end_a_job_that_others_do(tmp_path: Path) -> None:
    assert lost_workers(HalfCluster, tmp_path) > LOADS


def test_idle_workers_are_not_replaced_while_the_last_shard_is_packed(tmp_path: Path) -> None:
    assert lost_workers(IdleWorker, tmp_path) == 0
