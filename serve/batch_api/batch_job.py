"""One batch, from its first picture to its last line: `sdxl batch`'s driver and ledger over the
service's own replicas.

It may be killed at any moment; whoever begins again goes on from the ledger. Who has a turn, and
what becomes of the record, is the runner's to say.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serve.batch.driver import Driver, Stopped
from serve.batch.intake import Intake
from serve.batch.lock import locked
from serve.batch.progress import BatchProgress
from serve.batch.reading import read
from serve.batch.renderers import Renderer
from serve.batch.rows import ShardPiece
from serve.batch.shard_worker import BatchTask
from serve.batch.store import Store, token
from serve.batch.workers import thread_workers
from serve.batch_api.records import BatchRecord, Records
from serve.models import ImageModel
from serve.orders import ModelCard

INPUT = "input.jsonl"
SHARD = 128
SILENT_S = 60.0
"""The worker is a thread of the same process: a busy machine is no reason to replace it."""


def keep_input(records: Records, batch: BatchRecord) -> None:
    """The job's own copy: the file may be deleted while the batch runs."""
    store = records.job_store(batch.id)
    if INPUT not in store.names(""):
        store.join()
        store.put(INPUT, records.data(batch.input_file_id))


@contextmanager
def input_file(store: Store) -> Iterator[Path]:
    """As a file with a path of its own, wherever the store keeps it."""
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
        self._card: ModelCard | None = None
        self._driver: Driver | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """From any thread."""
        self._is_stopped = True
        if self._driver is not None:
            self._driver.stop()

    def make(self) -> bool:
        """False if it was stopped. Raises BatchFailed or OutputError if it cannot go on now."""
        store = self.records.job_store(self.batch.id)
        # While a service is replaced, two may be there.
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

        task, now_s = BatchTask(store, token(), "png"), time.monotonic()
        self._driver = Driver(
            thread_workers(self.load, task),
            workers=1,
            task=task,
            progress=BatchProgress(self.batch.pictures, now_s, now_s),
            on_card=self._meet,
            show=show,
            # The replicas may let low priority wait for hours, or restart meanwhile.
            stall_s=math.inf,
            silent_s=SILENT_S,
        )
        if self._is_stopped:
            raise Stopped
        self._driver.run(self._shards(path))

    def _meet(self, card: ModelCard) -> None:
        self._card = card

    def _shards(self, path: Path) -> Iterator[ShardPiece]:
        """Read when the first worker wants something, and then it is known what the model takes."""
        card = self._card
        assert card is not None
        id_, limits = self.model.id, self.model.settings
        usual = self.batch.usual_interval
        intake = Intake(
            {}, 1, id_, card.sizes, None, card.presets, limits, usual, are_ids_checked=True
        )
        yield from intake.shards(read([path]), SHARD)
