"""Runs and ends batches: the only writer of their records.

It polls the records. An owner's batches run one after another; batches of different owners run at
the same time, and the replicas share their time among them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sdxl.files import OutputError
from sdxl.params import InvalidParams
from serve import logs
from serve.batch.batch_spec import BatchFailed
from serve.batch.progress import BatchProgress
from serve.batch_api import answers, lines
from serve.batch_api.batch_job import BackendRenderer, BatchJobRun, input_file, keep_input
from serve.batch_api.image_jobs import ImageJobRunner
from serve.batch_api.records import (
    ANYBODY,
    FILES,
    BatchRecord,
    FileRecord,
    ImageJobRecord,
    OpenRecords,
    Part,
    Records,
    Status,
    id_of,
    owner_of,
)
from serve.batch_api.webhooks import Outbox, read_endpoints
from serve.front.keys import Keyring, RateLimiter
from serve.models import image_models
from serve.orders import ImageBackend
from serve.run_time_models import ModelPool
from serve.settings import ServeSettings

log = logging.getLogger(__name__)

UPDATE_S = 2.0
"""How often a running batch's record is updated."""
RETRY_S = 10.0
"""Pause before a batch that an error stopped is retried."""
MOST_FAILURES, MOST_TEXT = 3, 500
SWEEP_S = 600.0
UNFINISHED_S = 24 * 3600
"""An unfinished file of this age is abandoned."""
AT_ONCE = 8
"""The most running batches."""
RESULTS = "batch_output"


class BatchReplica:
    """The runner as a Ray Serve deployment of one process. All state is in the store."""

    def __init__(self, settings: ServeSettings, replicas: Sequence[Any]) -> None:
        """`replicas` are handles in the order of the settings' models."""
        logs.configure(settings.log_format)
        from serve.fleet.replicas import Replicas
        from serve.ray_models import RayModels

        records = Records(settings.batches_dir)
        self.outbox = Outbox(records, read_endpoints(settings.webhooks))

        def backends() -> list[ImageBackend]:
            return [Replicas(handle) for handle in replicas]

        self.runner = BatchRunner(records, settings, backends, self.outbox)
        self.jobs = self.runner.image_jobs(
            lambda: RayModels(settings) if settings.models_dir else None
        )
        for each in self.parts:
            each.start()

    async def check_health(self) -> None:
        """Called by Ray, which replaces the process if this raises."""
        if not (self.runner.is_alive and self.jobs.is_alive):
            raise RuntimeError("the runner of batches or of jobs has ended")

    @property
    def parts(self) -> tuple[BatchRunner, ImageJobRunner, Outbox]:
        return self.runner, self.jobs, self.outbox

    def __del__(self) -> None:
        if hasattr(self, "jobs"):
            for each in self.parts:
                each.close()


@dataclass
class Turn:
    """A running batch and its thread."""

    batch: BatchRecord
    run: BatchJobRun
    thread: threading.Thread
    updated_s: float = 0.0
    ends_as: Status | None = None
    """the status of a batch that was stopped"""


@dataclass
class BatchRunner:
    records: Records
    settings: ServeSettings
    backends: Callable[[], Sequence[ImageBackend]]
    """in the order of the settings' models; called in the batch's thread"""
    outbox: Outbox | None = None
    clock: Callable[[], float] = time.time

    _turns: dict[str, Turn] = field(default_factory=dict)
    _retry_s: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """each batch's consecutive equal errors, with the number of pictures then"""
    _leave: threading.Event = field(default_factory=threading.Event)
    _swept_s: float = 0.0
    _orphaned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        keys = Keyring.read(Path(self.settings.keys)).keys if self.settings.keys else ()
        self._keys = {owner_of(key): key for key in keys}
        self._limiter = RateLimiter()
        self._models = image_models(self.settings)
        self._open = OpenRecords(self.records, BatchRecord)
        self._thread = threading.Thread(target=self._poll_forever, name="batches", daemon=True)

    def image_jobs(self, pool: Callable[[], ModelPool | None] = lambda: None) -> ImageJobRunner:
        """Return a runner of jobs. Jobs and batches share the keys' rates."""
        return ImageJobRunner(
            self.records,
            self.settings,
            self.backends,
            self._keys,
            self._limiter,
            self.outbox,
            pool,
        )

    def start(self) -> None:
        self.records.prepare()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop running batches; the next runner resumes them."""
        self._leave.set()
        turns = self._running()
        for turn in turns:
            turn.run.stop()
        for thread in (self._thread, *(turn.thread for turn in turns)):
            thread.join(timeout_s)

    def _poll_forever(self) -> None:
        while not self._leave.wait(self._open.pause_s):
            try:
                self.poll()
            except Exception:
                # A full disk or an unreachable bucket may recover.
                log.exception("batches: cannot read the records")

    def poll(self) -> None:
        open_batches = self._open.read()
        for batch in open_batches:
            if time.monotonic() >= self._retry_s.get(batch.id, 0.0):
                try:
                    self._update(batch, open_batches)
                except Exception as error:
                    # Other batches continue, and the sweep may free the space that this one needs.
                    self._retry_later(batch, error)
        if self.clock() - self._swept_s > SWEEP_S:
            self._swept_s = self.clock()
            sweep(self.records, int(self.clock()))
            self._orphaned = sweep_data(self.records, self._orphaned)

    # -- one batch --------------------------------------------------------------------------

    def _update(self, batch: BatchRecord, others: Sequence[BatchRecord]) -> None:
        turn, end = self._turns.get(batch.id), self._due_end(batch)
        if turn is not None:
            if end is not None and turn.ends_as is None:
                turn.ends_as = end
                turn.run.stop()
            return
        # The batch may have ended since the record was read.
        now = self.records.read(BatchRecord, batch.owner, batch.id)
        if now is None or now.is_ended:
            return
        batch = now
        if batch.owner not in (ANYBODY, *self._keys):
            self._fail(batch, [lines.error_of("invalid_api_key", "Its key is no longer valid.")])
        elif batch.status == "validating":
            self._check(batch)
        elif end is not None:
            self._end(batch, end)
        elif self._has_turn(batch):
            self._begin(batch)
        else:
            self._update_position(batch, others)

    def _due_end(self, batch: BatchRecord) -> Status | None:
        """Return the status with which the batch must end now, if any."""
        if self.records.asked_to_cancel(batch.id) is not None:
            return "cancelled"
        return "expired" if self.clock() > batch.expires_at else None

    def _has_turn(self, batch: BatchRecord) -> bool:
        is_owner_idle = all(turn.batch.owner != batch.owner for turn in self._running())
        return is_owner_idle and len(self._turns) < AT_ONCE

    def _running(self) -> list[Turn]:
        return list(self._turns.values())

    def _check(self, batch: BatchRecord) -> None:
        try:
            keep_input(self.records, batch)
        except FileNotFoundError:
            self._fail(batch, [lines.error_of("file_not_found", "The input file is gone.")])
            return
        with input_file(self.records.job_store(batch.id)) as path:
            most = self.settings.max_batch_requests
            checked = lines.check(path, most, self._models)
        if checked.errors:
            self._fail(batch, checked.errors)
            return
        if checked.shares:
            self.records.share(batch)
        self.records.put(
            replace(
                batch,
                status="in_progress",
                in_progress_at=int(self.clock()),
                model=checked.model,
                total=checked.total,
                pictures=checked.pictures,
            )
        )

    def _begin(self, batch: BatchRecord) -> None:
        key, ids = self._keys.get(batch.owner), [model.id for model in self._models]
        if batch.model not in ids:
            message = f"The batch is of {batch.model!r}; here is {', '.join(map(repr, ids))} now."
            self._end(batch, "failed", [lines.error_of("other_model", message)])
            return
        index = ids.index(batch.model)
        model = self._models[index]

        def load() -> BackendRenderer:
            backend, name = self.backends()[index], model.settings.model_name
            return BackendRenderer(backend, batch.client, batch.id, key, self._limiter, name)

        update = partial(self._update_record, batch.id)
        run = BatchJobRun(self.records, batch, model, load, update)
        thread = threading.Thread(target=self._make, args=(batch.id,), name=batch.id, daemon=True)
        self._turns[batch.id] = Turn(batch, run, thread)
        log.info("%s begins: %d requests", batch.id, batch.total)
        thread.start()

    def _make(self, id_: str) -> None:
        """Make a batch, in its thread."""
        turn = self._turns[id_]
        try:
            is_whole = turn.run.make()
            if (is_whole or turn.ends_as is not None) and not self._is_over(turn.batch):
                self._end(turn.batch, turn.ends_as or "completed")
        except Exception as error:
            self._retry_later(turn.batch, error)
        finally:
            del self._turns[id_]

    def _retry_later(self, batch: BatchRecord, error: Exception) -> None:
        """Schedule a retry. After the same error three times in a row, without a picture in
        between, the batch fails. Errors of the disk are retried until the batch's window ends."""
        is_expected = isinstance(error, BatchFailed | OutputError | InvalidParams)
        log.warning("%s: %s", batch.id, error, exc_info=None if is_expected else error)
        text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
        failure = (text, batch.pictures_done)
        same = [each for each in self._failures.get(batch.id, []) if each == failure]
        self._failures[batch.id] = [*same, failure]
        if len(same) + 1 < MOST_FAILURES or isinstance(error, OutputError):
            log.warning("%s: retry in %g s", batch.id, RETRY_S)
            self._retry_s[batch.id] = time.monotonic() + RETRY_S
            return
        del self._failures[batch.id]
        if self._is_over(batch):
            return
        errors = [lines.error_of("batch_failed", text[:MOST_TEXT])]
        try:
            self._end(batch, "failed", errors)
        except Exception:
            # The same error may prevent the result files.
            log.exception("%s: cannot write its output files", batch.id)
            self._fail(batch, errors)

    def _is_over(self, batch: BatchRecord) -> bool:
        """Return whether the batch has ended: while a service is replaced, another runner may end
        and remove it."""
        now = self.records.read(BatchRecord, batch.owner, batch.id)
        return now is None or now.is_ended

    # -- the record -------------------------------------------------------------------------

    def _update_record(self, id_: str, progress: BatchProgress) -> None:
        turn = self._turns[id_]
        if progress.now_s - turn.updated_s < UPDATE_S:
            return
        turn.updated_s, batch = progress.now_s, turn.batch
        if self._is_over(batch):
            turn.run.stop()
            return
        # Progress counts pictures; a request may have several.
        share = batch.total / max(batch.pictures, 1)
        turn.batch = replace(
            batch,
            completed=int((progress.made + progress.found) * share),
            failed=progress.dead,
            pictures_done=progress.done,
            position=0,
            eta_s=None if progress.eta_s is None else round(progress.eta_s, 1),
            images_per_s=round(progress.rate, 3),
        )
        self.records.put(turn.batch)

    def _update_position(self, batch: BatchRecord, others: Sequence[BatchRecord]) -> None:
        queue = [each for each in others if each.owner == batch.owner]
        before = queue[: [each.id for each in queue].index(batch.id)]
        running = next((t.batch for t in self._running() if t.batch.owner == batch.owner), None)
        eta_s = None
        if running is not None and running.images_per_s:
            waiting = [each for each in before if each.id != running.id]
            left = sum(each.pictures - each.pictures_done for each in (running, *waiting, batch))
            eta_s = round(left / running.images_per_s, -1)
        if (batch.position, batch.eta_s) != (len(before), eta_s):
            self.records.put(replace(batch, position=len(before), eta_s=eta_s))

    def _fail(self, batch: BatchRecord, errors: list[dict[str, Any]]) -> None:
        self._write_end(replace(batch, status="failed", errors=errors))

    def _end(
        self, batch: BatchRecord, status: Status, errors: list[dict[str, Any]] | None = None
    ) -> None:
        """Write the result files, then the end into the record and the outbox."""
        if batch.finalizing_at is None:
            batch = replace(batch, status="finalizing", finalizing_at=int(self.clock()))
            self.records.put(batch)
        store = self.records.job_store(batch.id)
        store.join("images", "ledger")
        with input_file(store) as path:
            counts = answers.count(batch, path, store, status)
        if status == "expired" and counts.completed + counts.failed == batch.total:
            status = "completed"
        self._write_end(
            replace(
                batch,
                status=status,
                errors=errors or [],
                output_file_id=self._add_file(batch, "output", counts.sizes["output"]),
                error_file_id=self._add_file(batch, "errors", counts.sizes["errors"]),
                completed=counts.completed,
                failed=counts.failed,
                pictures_done=counts.pictures,
                prompt_tokens=counts.prompt_tokens,
                cancelling_at=self.records.asked_to_cancel(batch.id),
            )
        )

    def _add_file(self, batch: BatchRecord, part: Part, size: int) -> str | None:
        if not size:
            return None
        id_, name = id_of("file-", batch.id, part), f"{batch.id}_{part}.jsonl"
        marks = {"batch": batch.id, "part": part}
        file = FileRecord.new(id_, name, RESULTS, size, batch.files_live_s, **marks)
        self.records.add_file(batch.owner, file)
        return file.id

    def _write_end(self, batch: BatchRecord) -> None:
        ended = replace(
            batch, ended_at=int(self.clock()), position=None, eta_s=None, images_per_s=0.0
        )
        if self.outbox is not None:
            self.outbox.add(ended)
        self.records.put(ended)
        log.info("%s %s: %d made, %d failed", ended.id, ended.status, ended.completed, ended.failed)


def sweep(records: Records, now: int) -> None:
    """Remove expired files, batches and jobs, pictures without a result file, and abandoned
    files."""
    for owner in records.owners(FILES):
        for file in records.read_all(FileRecord, owner):
            if file.expires_at < now:
                records.drop_file(owner, file)
    for owner in records.owners():
        # Before the files are listed: a batch that ends in between has a file by then.
        batches = records.read_all(BatchRecord, owner)
        files = set(records.ids(FILES, owner))
        for batch in batches:
            if not batch.is_ended:
                continue
            is_old = (batch.ended_at or 0) + batch.files_live_s < now
            if is_old or not files & {batch.output_file_id, batch.error_file_id}:
                records.job_store(batch.id).remove_all()
            if is_old:
                records.drop(batch)
    for owner in records.owners(ImageJobRecord.folder):
        for job in records.read_all(ImageJobRecord, owner):
            if job.has_expired(now):
                records.drop(job)
                for name in (job.id, *job.pictures):
                    records.drop_data(name)
    records.store.sweep(now - UNFINISHED_S)


def sweep_data(records: Records, before: set[str]) -> set[str]:
    """Remove data that has no record now and had none at the last sweep; a new upload has one by
    then. `before`: the last sweep's answer. Return the data without a record."""
    unnamed = records.orphaned_data()
    for id_ in unnamed & before:
        records.drop_data(id_)
    return unnamed - before
