"""Runs the jobs of `/v1/images/jobs` in the order of their arrival.

All state is in the store. A job that a restart interrupts runs again, from the same seed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from sdxl.files import OutputError
from serve import errors
from serve.batch_api.batch_job import BackendRenderer
from serve.batch_api.records import ANYBODY, DATA, ImageJobRecord, OpenRecords, Records, Status
from serve.batch_api.webhooks import Outbox
from serve.errors import Problem
from serve.front.answering import fan_out
from serve.front.generations import reply_of, size
from serve.front.keys import ApiKey, RateLimiter
from serve.front.openai_images import ImageRequest
from serve.front.request_reader import RequestReader
from serve.front.runs import Run
from serve.front.sent_pictures import DecodingThread
from serve.front.served_models import ServedModels
from serve.orders import Done, ImageBackend
from serve.run_time_models import ModelPool
from serve.settings import ServeSettings

log = logging.getLogger(__name__)

AT_ONCE = 32
"""The most running jobs of one owner; few, so that the queue has room for other requests."""
UPDATE_S = 1.0
"""How often a running job's record is updated."""
RETRY_S = 10.0
"""Pause before a failed write, as on a full disk, is repeated."""


@dataclass
class ImageJobRunner:
    records: Records
    settings: ServeSettings
    backends: Callable[[], Sequence[ImageBackend]]
    """in the order of the settings' models; called in the jobs' thread"""
    keys: Mapping[str, ApiKey]
    """by owner"""
    limiter: RateLimiter
    outbox: Outbox | None = None
    pool: Callable[[], ModelPool | None] = lambda: None
    """loads models at run time; called in the jobs' thread"""

    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _ending: set[str] = field(default_factory=set)
    """ids of jobs whose end is being written"""
    _leave: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._open = OpenRecords(self.records, ImageJobRecord)
        run = self._run_until_left
        self._thread = threading.Thread(target=lambda: asyncio.run(run()), name="jobs", daemon=True)

    def start(self) -> None:
        self.records.prepare()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop; the next runner makes running jobs again."""
        self._leave.set()
        self._thread.join(timeout_s)

    async def _run_until_left(self) -> None:
        models = ServedModels(self.settings, self.backends(), pool=self.pool())
        self._reader = RequestReader(models, DecodingThread())
        while not await asyncio.to_thread(self._leave.wait, self._open.pause_s):
            try:
                await self._poll()
            except Exception:
                # A full disk or an unreachable bucket may recover.
                log.exception("jobs: cannot read the records")
        for task in (tasks := list(self._tasks.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self) -> None:
        await self._reader.models.refresh()
        # Listed before the records are read, since a job may end meanwhile.
        running, before = set(self._tasks), Counter[str]()
        jobs = await asyncio.to_thread(self._open.read)
        cancelled = await asyncio.to_thread(self.records.cancelled)
        for job in jobs:
            place, before[job.owner] = before[job.owner], before[job.owner] + 1
            if job.id in running & self._tasks.keys():
                if job.id in cancelled and job.id not in self._ending:
                    # The next poll finds no task and ends the job as cancelled.
                    self._tasks[job.id].cancel()
            elif job.id in running:
                # The job has ended since.
                continue
            elif job.id in cancelled:
                self._begin(job, self._write_end(job, "cancelled"))
            elif place < AT_ONCE:
                self._begin(job, self._make(job))
            elif job.position != place:
                await asyncio.to_thread(self.records.put, replace(job, position=place))

    def _begin(self, job: ImageJobRecord, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[job.id] = task = asyncio.create_task(work, name=job.id)
        task.add_done_callback(lambda _: self._forget(job.id))

    def _forget(self, id_: str) -> None:
        del self._tasks[id_]
        self._ending.discard(id_)

    async def _make(self, job: ImageJobRecord) -> None:
        job = replace(job, status="in_progress", in_progress_at=int(time.time()), position=0)
        try:
            asked, picture_size, done = await self._pictures(job)
        except Problem as problem:
            await self._write_end(job, "failed", error=problem.as_dict())
        except Exception:
            log.exception("%s failed", job.id)
            await self._write_end(job, "failed", error=errors.unexpected().as_dict())
        else:
            urls = None
            if asked.response_format == "url":
                names = [f"{index}.{asked.format}" for index in range(len(done))]
                urls = [f"{job.origin}/v1/results/{job.secret}/{name}" for name in names]
            result = reply_of(asked, picture_size, done, urls).model_dump(exclude_none=True)
            await self._write_end(job, "completed", done, progress=1.0, result=result)

    async def _pictures(self, job: ImageJobRecord) -> tuple[ImageRequest, str, list[Done]]:
        key = self.keys.get(job.owner)
        if key is None and job.owner != ANYBODY:
            raise Problem(401, "Its key is no longer valid.", None, "invalid_api_key")
        body = await asyncio.to_thread(self.records.data, job.id)
        asked = await self._reader.read_json(body)
        deadline_s = asked.request.deadline_s or float("inf")
        orders = asked.orders(job.seed, deadline_s, {"wants_progress": True})
        renderer = BackendRenderer(
            asked.model.backend,
            job.client,
            job.id,
            key,
            self.limiter,
            asked.model.settings.model_name,
            orders[0].priority,
        )
        run, updated_s = Run(len(orders), orders[0].params.all_steps), float("-inf")
        async with aclosing(fan_out(renderer, orders, deadline_s)) as updates:
            async for index, update in updates:
                run.note(index, update)
                if time.monotonic() - updated_s >= UPDATE_S:
                    updated_s = time.monotonic()
                    await self._update(job, run)
        return asked.request, size(orders[0]), run.pictures

    async def _update(self, job: ImageJobRecord, run: Run) -> None:
        eta_s = round(run.eta_s, 1) if run.progress else None
        now = replace(job, position=run.position, eta_s=eta_s, progress=round(run.share, 3))
        try:
            await asyncio.to_thread(self.records.put, now)
        except OutputError as error:
            log.warning("%s: %s", job.id, error)

    async def _write_end(
        self, job: ImageJobRecord, status: Status, done: Sequence[Done] = (), **facts: Any
    ) -> None:
        """Write the pictures, then the job's end into the outbox and the record."""
        self._ending.add(job.id)
        facts |= {"ended_at": int(time.time()), "position": None, "eta_s": None}
        ended = replace(job, status=status, **facts)

        def write() -> None:
            for name, each in zip(ended.pictures, done, strict=True):
                self.records.store.put(f"{DATA}/{name}", each.image)
            if self.outbox is not None:
                self.outbox.add(ended)
            self.records.put(ended)

        while True:
            try:
                await asyncio.to_thread(write)
                log.info("%s %s", ended.id, status)
                return
            except OutputError as error:
                log.warning("%s: %s; retry in %g s", ended.id, error, RETRY_S)
                await asyncio.sleep(RETRY_S)
