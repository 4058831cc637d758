"""Runs one batch with the driver and ledger of `sdxl batch` on the service's replicas.

It may be killed at any moment; the next run resumes from the ledger.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdxl.flight import Priority
from serve.batch.driver import Driver, Stopped
from serve.batch.intake import Intake
from serve.batch.lock import locked
from serve.batch.progress import BatchProgress
from serve.batch.reading import read
from serve.batch.renderers import BUSY, Renderer, ServiceRenderer
from serve.batch.rows import ShardPiece
from serve.batch.shard_worker import BatchTask
from serve.batch.store import Store, token
from serve.batch.workers import thread_workers
from serve.batch_api.records import BatchRecord, Records
from serve.errors import Problem
from serve.front.generations import work_of
from serve.front.keys import ApiKey, RateLimiter
from serve.models import ImageModel
from serve.orders import ImageBackend, ImageOrder, ModelCard, Update

INPUT = "input.jsonl"
SHARD = 128
SILENT_S = 60.0
"""Long, since the worker is a thread of this process, which may be slow on a busy machine."""
CARD_PAUSE_S = 1.0


class BackendRenderer(ServiceRenderer):
    """Renders a client's orders on the service's replicas, within its key's rate."""

    def __init__(
        self,
        backend: ImageBackend,
        client: str,
        request_id: str,
        key: ApiKey | None = None,
        limiter: RateLimiter | None = None,
        model: str = "",
        priority: Priority = Priority.BATCH,
    ) -> None:
        """Only `model`, a name in the settings, may make the pictures."""
        self._backend, self._key = backend, key
        self._limiter = limiter or RateLimiter()
        weight = 1.0 if key is None else key.weight
        marks = {"client": client, "weight": weight, "request_id": request_id, "model": model}
        self._marks: dict[str, Any] = {"priority": priority, **marks}

    async def card(self) -> ModelCard:
        while True:
            try:
                card = await self._backend.card()
            except Problem as problem:
                if problem.status not in BUSY:
                    raise
                await asyncio.sleep(CARD_PAUSE_S)
            else:
                self._keep_window(card)
                return card

    async def _prepare(self, order: ImageOrder) -> ImageOrder:
        """Mark the order, and wait for the key's rate."""
        order = replace(order, **self._marks)
        if self._key is not None:
            work = work_of([order], await self.card())
            while wait_s := self._limiter.take(self._key, 1, work)[1]:
                await asyncio.sleep(wait_s)
        return order

    def _send(self, order: ImageOrder) -> AsyncGenerator[Update]:
        return self._backend.generate(order)


def keep_input(records: Records, batch: BatchRecord) -> None:
    """Copy the input file, since a client may delete it while the batch runs."""
    store = records.job_store(batch.id)
    if INPUT not in store.names(""):
        store.join()
        store.put(INPUT, records.data(batch.input_file_id))


@contextmanager
def input_file(store: Store) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, INPUT)
        path.write_bytes(store.get(INPUT))
        yield path


@dataclass
class BatchJobRun:
    records: Records
    batch: BatchRecord
    model: ImageModel
    load: Callable[[], Renderer]
    on_progress: Callable[[BatchProgress], None]

    def __post_init__(self) -> None:
        self._driver: Driver | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Stop soon. May be called from any thread."""
        self._is_stopped = True
        if self._driver is not None:
            self._driver.stop()

    def make(self) -> bool:
        """Make all pictures; return False if stopped. Raises BatchFailed or OutputError."""
        store = self.records.job_store(self.batch.id)
        # There may be two runners while a service is replaced.
        place = self.records.job_place(self.batch.id)
        with locked(place) as check_lock, input_file(store) as path:
            store.prepare("images", "ledger")
            try:
                self._run(store, path, check_lock)
            except Stopped:
                return False
            store.tidy()
            return True

    def _run(self, store: Store, path: Path, check_lock: Callable[[], None]) -> None:
        def show(progress: BatchProgress) -> None:
            check_lock()
            self.on_progress(progress)

        task, now_s, cards = BatchTask(store, token(), "png"), time.monotonic(), list[ModelCard]()
        self._driver = Driver(
            thread_workers(self.load, task),
            workers=1,
            task=task,
            progress=BatchProgress(self.batch.pictures, now_s, now_s),
            on_card=cards.append,
            show=show,
            # The replicas may delay low-priority orders for hours, or restart meanwhile.
            stall_s=math.inf,
            silent_s=SILENT_S,
        )
        if self._is_stopped:
            raise Stopped
        self._driver.run(self._shards(path, cards))

    def _shards(self, path: Path, cards: Sequence[ModelCard]) -> Iterator[ShardPiece]:
        """Read the input. The driver calls this after the first worker's card."""
        facts = (self.model.id, cards[0].sizes, None, cards[0].presets, self.model.settings)
        intake = Intake({}, 1, *facts, are_ids_checked=True)
        yield from intake.shards(read([path]), SHARD)
