"""Whose batch has its turn, and what becomes of each: the one writer of batches' records.

It looks at the records again and again. An owner's batches are made one after another, those of
different owners beside each other; the replicas share between them. It draws nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sdxl.files import OutputError
from sdxl.params import InvalidParams
from serve.batch.batch_spec import BatchFailed
from serve.batch.progress import BatchProgress
from serve.batch.store import Store
from serve.batch_api import answers, lines
from serve.batch_api.batch_job import BatchJobRun, input_file, keep_input
from serve.batch_api.records import (
    ANYBODY,
    BatchRecord,
    FileRecord,
    Part,
    Records,
    Status,
    id_of,
    owner_of,
)
from serve.batch_api.renderer import BackendRenderer
from serve.batch_api.webhooks import Outbox
from serve.front.keys import ApiKey, Keyring, RateLimiter
from serve.models import image_models
from serve.orders import ImageBackend
from serve.settings import ServeSettings

log = logging.getLogger(__name__)

LOOK_S, LOOK_AT_BUCKET_S = 0.5, 5.0
NOTE_S = 2.0
"""How often a record says how far its batch is."""
AGAIN_S = 10.0
"""The pause before a batch that an error stopped is tried again."""
MOST_FAILURES, MOST_TEXT = 3, 500
SWEEP_S = 600.0
UNFINISHED_S = 24 * 3600
"""No file takes as long to be written."""
AT_ONCE = 8
"""batches of different owners"""
RESULTS = "batch_output"


@dataclass
class Turn:
    """A batch that is being made, in a thread of its own."""

    batch: BatchRecord
    run: BatchJobRun
    thread: threading.Thread
    noted_s: float = 0.0
    ends_as: Status | None = None
    """why it was stopped"""


@dataclass
class Failures:
    """How often in a row one batch was stopped by the same error."""

    text: str = ""
    pictures: int = 0
    count: int = 0

    def add(self, text: str, pictures: int) -> int:
        is_same = (text, pictures) == (self.text, self.pictures)
        self.text, self.pictures, self.count = text, pictures, self.count + 1 if is_same else 1
        return self.count


@dataclass
class BatchRunner:
    records: Records
    settings: ServeSettings
    backends: Callable[[], Sequence[ImageBackend]]
    """in the order of the settings' models; called in the thread that will ask them"""
    outbox: Outbox | None = None
    clock: Callable[[], float] = time.time

    _turns: dict[str, Turn] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _again_s: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, Failures] = field(default_factory=dict)
    _leave: threading.Event = field(default_factory=threading.Event)
    _swept_s: float = 0.0
    _unnamed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        keys = Keyring.read(Path(self.settings.keys)).keys if self.settings.keys else ()
        self._keys = {owner_of(key): key for key in keys}
        self._limiter = RateLimiter()
        self._models = image_models(self.settings)
        self._thread = threading.Thread(target=self._look_again, name="batches", daemon=True)

    def start(self) -> None:
        self.records.prepare()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float = 10.0) -> None:
        """Batches under way stay as they are: whoever starts next goes on."""
        self._leave.set()
        turns = self._running()
        for turn in turns:
            turn.run.stop()
        for thread in (self._thread, *(turn.thread for turn in turns)):
            thread.join(timeout_s)

    def _look_again(self) -> None:
        pause_s = LOOK_AT_BUCKET_S if "://" in self.records.place else LOOK_S
        while not self._leave.wait(pause_s):
            try:
                self.look()
            except Exception:
                # A disk that is full today, a bucket that cannot be reached: no reason to end.
                log.exception("batches: could not look at the records")

    def look(self) -> None:
        open_batches = self._open()
        for batch in open_batches:
            if time.monotonic() >= self._again_s.get(batch.id, 0.0):
                try:
                    self._consider(batch, open_batches)
                except Exception as error:
                    # The others have their turns, and the sweep may make the room that it needs.
                    self._try_again(batch, error)
        if self.clock() - self._swept_s > SWEEP_S:
            self._swept_s = self.clock()
            sweep(self.records, int(self.clock()))
            self._unnamed = sweep_data(self.records, self._unnamed)

    def _open(self) -> list[BatchRecord]:
        """All that have not ended, the oldest first."""
        found = []
        for owner in self.records.owners():
            for id_ in self.records.batch_ids(owner):
                batch = None if id_ in self._ended else self.records.batch(owner, id_)
                if batch is None:
                    continue
                if batch.is_ended:
                    self._ended.add(id_)
                else:
                    found.append(batch)
        return sorted(found, key=lambda batch: batch.arrived_s)

    # -- one batch --------------------------------------------------------------------------

    def _consider(self, batch: BatchRecord, others: Sequence[BatchRecord]) -> None:
        turn, end = self._turns.get(batch.id), self._end_of(batch)
        if turn is not None:
            if end is not None and turn.ends_as is None:
                turn.ends_as = end
                turn.run.stop()
            return
        # Since it was read its turn may have ended.
        now = self.records.batch(batch.owner, batch.id)
        if now is not None and not now.is_ended:
            self._advance(now, end, others)

    def _advance(
        self, batch: BatchRecord, end: Status | None, others: Sequence[BatchRecord]
    ) -> None:
        if batch.owner not in (ANYBODY, *self._keys):
            self._fail(batch, [lines.error_of("invalid_api_key", "Its key is no longer valid.")])
        elif batch.status == "validating":
            self._check(batch)
        elif end is not None:
            self._end(batch, end)
        elif self._has_turn(batch):
            self._begin(batch)
        else:
            self._tell_place(batch, others)

    def _end_of(self, batch: BatchRecord) -> Status | None:
        if self.records.asked_to_cancel(batch.id) is not None:
            return "cancelled"
        return "expired" if self.clock() > batch.expires_at else None

    def _has_turn(self, batch: BatchRecord) -> bool:
        is_owners_first = all(turn.batch.owner != batch.owner for turn in self._running())
        return is_owners_first and len(self._turns) < AT_ONCE

    def _running(self) -> list[Turn]:
        return list(self._turns.values())

    def _check(self, batch: BatchRecord) -> None:
        try:
            keep_input(self.records, batch)
        except FileNotFoundError:
            self._fail(batch, [lines.error_of("file_not_found", "The input file is gone.")])
            return
        with input_file(self.records.job_store(batch.id)) as path:
            checked = lines.check(
                path, batch.endpoint, self.settings.max_batch_requests, self._models
            )
        if checked.errors:
            self._fail(batch, checked.errors)
            return
        if checked.shares:
            self.records.share(batch)
        self.records.put_batch(
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
        # Records of before there were several may name none yet.
        batch = replace(batch, model=batch.model or ids[0])
        if batch.model not in ids:
            message = f"The batch is of {batch.model!r}; here is {', '.join(map(repr, ids))} now."
            self._end(batch, "failed", [lines.error_of("other_model", message)])
            return
        index = ids.index(batch.model)
        run = BatchJobRun(
            self.records,
            batch,
            self._models[index],
            lambda: self._renderer(batch, key, index),
            lambda progress: self._note(batch.id, progress),
        )
        thread = threading.Thread(target=self._make, args=(batch.id,), name=batch.id, daemon=True)
        self._turns[batch.id] = Turn(batch, run, thread)
        log.info("%s begins: %d requests", batch.id, batch.total)
        thread.start()

    def _renderer(self, batch: BatchRecord, key: ApiKey | None, index: int) -> BackendRenderer:
        backend, model = self.backends()[index], self._models[index]
        return BackendRenderer(
            backend, batch.client, batch.id, key, self._limiter, model.settings.model_name
        )

    def _make(self, id_: str) -> None:
        """In the batch's own thread."""
        turn = self._turns[id_]
        try:
            is_whole = turn.run.make()
            if (is_whole or turn.ends_as is not None) and not self._is_over(turn.batch):
                self._end(turn.batch, turn.ends_as or "completed")
        except Exception as error:
            self._try_again(turn.batch, error)
        finally:
            del self._turns[id_]

    def _try_again(self, batch: BatchRecord, error: Exception) -> None:
        """After a pause; the third time in a row that the same error stops it, without a picture
        made in between, the batch ends as failed. A full disk may have room later: it is waited
        for until the window ends."""
        is_expected = isinstance(error, BatchFailed | OutputError | InvalidParams)
        log.warning("%s: %s", batch.id, error, exc_info=None if is_expected else error)
        text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
        failures = self._failures.setdefault(batch.id, Failures())
        count = failures.add(text, batch.pictures_done)
        if count < MOST_FAILURES or isinstance(error, OutputError):
            log.warning("%s is tried again in %g s", batch.id, AGAIN_S)
            self._again_s[batch.id] = time.monotonic() + AGAIN_S
            return
        del self._failures[batch.id]
        if self._is_over(batch):
            return
        errors = [lines.error_of("batch_failed", text[:MOST_TEXT])]
        try:
            self._end(batch, "failed", errors)
        except Exception:
            # What stops the batch may stop its files, too.
            log.exception("%s has no output files", batch.id)
            self._fail(batch, errors)

    def _is_over(self, batch: BatchRecord) -> bool:
        """While a service is replaced another runner may end it, and it may even be gone by now."""
        now = self.records.batch(batch.owner, batch.id)
        return now is None or now.is_ended

    # -- what a record says -----------------------------------------------------------------

    def _note(self, id_: str, progress: BatchProgress) -> None:
        turn = self._turns[id_]
        if progress.now_s - turn.noted_s < NOTE_S:
            return
        turn.noted_s, batch = progress.now_s, turn.batch
        if self._is_over(batch):
            turn.run.stop()
            return
        # Of requests for several pictures each, as many as that many pictures make.
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
        self.records.put_batch(turn.batch)

    def _tell_place(self, batch: BatchRecord, others: Sequence[BatchRecord]) -> None:
        """Of one that waits for its turn."""
        mine = [each for each in others if each.owner == batch.owner]
        mine = mine[: [each.id for each in mine].index(batch.id)]
        making = next((t.batch for t in self._running() if t.batch.owner == batch.owner), None)
        eta_s = None
        if making is not None and making.images_per_s:
            first = [each for each in mine if each.id != making.id]
            left = sum(each.pictures - each.pictures_done for each in (making, *first, batch))
            eta_s = round(left / making.images_per_s, -1)
        if (batch.position, batch.eta_s) != (len(mine), eta_s):
            self.records.put_batch(replace(batch, position=len(mine), eta_s=eta_s))

    def _fail(self, batch: BatchRecord, errors: list[dict[str, Any]]) -> None:
        self._note_end(replace(batch, status="failed", errors=errors))

    def _end(
        self, batch: BatchRecord, status: Status, errors: list[dict[str, Any]] | None = None
    ) -> None:
        """Its files; then its record says how it ended, and then everybody hears of it."""
        if batch.finalizing_at is None:
            batch = replace(batch, status="finalizing", finalizing_at=int(self.clock()))
            self.records.put_batch(batch)
        store = self.records.job_store(batch.id)
        store.join("images", "ledger")
        with input_file(store) as path:
            counted = answers.count(batch, path, store, status)
        if status == "expired" and counted.completed + counted.failed == batch.total:
            status = "completed"
        made = {part: self._add_file(batch, part, size) for part, size in counted.sizes.items()}
        self._note_end(
            replace(
                batch,
                status=status,
                errors=errors or [],
                output_file_id=made["output"],
                error_file_id=made["errors"],
                completed=counted.completed,
                failed=counted.failed,
                pictures_done=counted.pictures,
                prompt_tokens=counted.prompt_tokens,
                cancelling_at=self.records.asked_to_cancel(batch.id),
            )
        )

    def _add_file(self, batch: BatchRecord, part: Part, size: int) -> str | None:
        if not size:
            return None
        now_s = self.clock()
        id_ = id_of("file-", batch.id, part)
        name = f"{batch.id}_{part}.jsonl"
        file = FileRecord(
            id_,
            name,
            RESULTS,
            size,
            created_at=int(now_s),
            expires_at=int(now_s) + batch.files_live_s,
            arrived_s=now_s,
            batch=batch.id,
            part=part,
        )
        self.records.add_file(batch.owner, file)
        return id_

    def _note_end(self, batch: BatchRecord) -> None:
        ended = replace(
            batch, ended_at=int(self.clock()), position=None, eta_s=None, images_per_s=0.0
        )
        if self.outbox is not None:
            self.outbox.add(ended)
        self.records.put_batch(ended)
        log.info("%s %s: %d made, %d failed", ended.id, ended.status, ended.completed, ended.failed)


def sweep(records: Records, now: int) -> None:
    """Remove what has expired, the pictures that no file shows any more, and what was never
    finished."""
    for owner in records.owners("files"):
        for file in records.files(owner):
            if file.expires_at is not None and file.expires_at < now:
                records.drop_file(owner, file)
    for owner in records.owners():
        for batch in records.batches(owner):
            if not batch.is_ended:
                continue
            files = [id_ for id_ in (batch.output_file_id, batch.error_file_id) if id_]
            if all(records.file(owner, id_) is None for id_ in files):
                store: Store = records.job_store(batch.id)
                store.remove_all()
            if (batch.ended_at or 0) + batch.files_live_s < now:
                records.drop_batch(batch)
    records.store.sweep(now - UNFINISHED_S)


def sweep_data(records: Records, before: set[str]) -> set[str]:
    """Remove what no record has named since `before`, the answer of the last time: an upload has
    its record long by now."""
    found = records.unnamed_data()
    for id_ in found & before:
        records.drop_data(id_)
    return found - before
