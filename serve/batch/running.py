"""Runs a job, from its flags to its last file."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from sdxl.handover import apart
from sdxl.params import PICTURED
from sdxl.presets import Presets, preset_named
from serve.batch import progress as displays
from serve.batch import reading, results, tars
from serve.batch.batch_spec import HAS_DEAD, BatchSpec, ReportedInterrupt
from serve.batch.driver import Driver
from serve.batch.job import (
    FILE,
    KEPT,
    BatchJob,
    catalogue_for,
    check_engine,
    engine_of,
    files_in,
    load_job,
    refiner_file,
)
from serve.batch.lock import LEAVE_S, locked
from serve.batch.progress import BatchProgress, counted
from serve.batch.renderers import HttpRenderer, load_local, service_card
from serve.batch.rows import ShardPiece
from serve.batch.shard_worker import BatchTask, Load
from serve.batch.store import Store, open_store, token
from serve.batch.workers import StartWorker, ray_workers, thread_workers, threads_for
from serve.orders import ModelCard
from serve.render.input_pictures import read_file, read_pictures

WorkerPool = Callable[
    [BatchSpec, BatchJob, BatchTask], AbstractContextManager[tuple[StartWorker, int]]
]
"""Provides workers during a job, and their number."""


def run(order: BatchSpec, pool: WorkerPool | None = None) -> int:
    """Run a job and return its exit code. Tests pass a pool."""
    pool = pool or (through_service if order.through else on_ray)
    run_id = token()
    store = open_store(order.out, run_id)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, interrupt))
        check_lock = stack.enter_context(locked(order.out))
        stored = load_job(store)
        job = describe(order, None if stored is None else stored.presets)
        if stored is not None:
            job.check_same(stored)
            job = replace(job, **{name: getattr(stored, name) for name in KEPT})
        store.prepare("images", "ledger", *([tars.LOOSE] if order.is_tarred else []))
        task = BatchTask(
            store, run_id, order.format, order.is_tarred, order.retries_dead, order.reads_back
        )
        batch = BatchRun(order, store, task, job, stack, check_lock)
        try:
            return batch.make(*stack.enter_context(pool(order, job, task)))
        except KeyboardInterrupt as error:
            print_resume_hint(batch.progress, order)
            raise ReportedInterrupt from error


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def print_resume_hint(progress: BatchProgress, order: BatchSpec) -> None:
    done = f"{progress.done} of {counted(progress.rows, 'picture')} are in {order.out}"
    print(
        f"sdxl batch: interrupted; {done}. Rerun the same command to resume; "
        f"sdxl batch --status {order.out} shows progress",
        file=sys.stderr,
        flush=True,
    )


def describe(order: BatchSpec, presets: Presets | None = None) -> BatchJob:
    """Describe the job as far as possible without a worker. `presets`: the presets of the stored
    job."""
    paths = reading.find_inputs(order.inputs)
    if order.through is not None:
        card = service_card(order.through, order.key, order.model)
        usual = card.presets
        facts: dict[str, Any] = {"model": card.id, "model_sha256": "", "sizes": None}
    else:
        from engines.folders.digests import model_digest
        from sdxl.checkpoint import find

        checkpoint = find(order.model)
        usual = checkpoint.presets
        facts = {
            "model": checkpoint.name,
            "origin": checkpoint.origin,
            "model_sha256": model_digest(checkpoint),
            "sizes": checkpoint.sizes,
        }
    parameters = dict(order.parameters)
    if order.quality:
        parameters = preset_named(presets or usual, order.quality).beside(parameters)
    maps: dict[str, str] = {}
    for name in PICTURED:
        if given := parameters.get(name):
            parameters[name], _ = read_pictures(name, given, read_file)
            pairs = zip(parameters[name], given, strict=True)
            maps |= {now.image: os.path.abspath(each.image) for now, each in pairs if now.image}
    same = ("n", "format", "is_tarred", "shard_size", "deterministic")
    return BatchJob(
        inputs=tuple(str(path.absolute()) for path in paths),
        input_sha256=reading.input_digest(paths),
        rows=reading.count(paths) * order.n,
        parameters=parameters,
        presets=dict(usual),
        provenance="" if order.through else order.provenance.kind,
        engine={},
        maps=maps,
        threads=threads_for(max(order.workers, 1)),
        **{name: getattr(order, name) for name in same},
        **facts,
    )


@contextmanager
def through_service(
    order: BatchSpec, job: BatchJob, task: BatchTask
) -> Iterator[tuple[StartWorker, int]]:
    assert order.through is not None
    yield thread_workers(partial(HttpRenderer, order.through, order.key, job.model), task), 1


@contextmanager
def on_ray(
    order: BatchSpec, job: BatchJob, task: BatchTask, load: Load | None = None
) -> Iterator[tuple[StartWorker, int]]:
    import ray

    from serve.cli import RAY_ENVIRONMENT, start_ray

    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Without "local" Ray might join the cluster of a killed job.
    start_ray(
        address=order.address or "local",
        include_dashboard=None if order.address else False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    # Ray's handler would end this process at once.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        workers = order.workers or max(gpus, 1)
        load = load or partial(load_local, order)
        yield ray_workers(load, task, gpus > 0, job.threads), workers
    finally:
        ray.shutdown()


class BatchRun:
    def __init__(
        self,
        order: BatchSpec,
        store: Store,
        task: BatchTask,
        job: BatchJob,
        stack: ExitStack,
        check_lock: Callable[[], None],
    ) -> None:
        self.order, self.store, self.task, self.job = order, store, task, job
        self._check_lock = check_lock
        self.progress = BatchProgress(job.rows, time.monotonic(), time.monotonic())
        self.status = displays.StatusFile(store, task.run)
        display = displays.Lines() if order.is_quiet else displays.Bar(job.rows)
        self._close_display = display.close
        stack.callback(display.close)
        self._shows: list[displays.Show] = [display, self.status]
        if order.metrics_port is not None:
            metrics = displays.Metrics(order.metrics_port)
            stack.callback(metrics.close)
            self._shows.append(metrics)

    def make(self, start_worker: StartWorker, workers: int) -> int:
        packer = tars.Packer(lambda shard: tars.pack(self.store, shard, self.task.run))
        driver = Driver(
            start_worker,
            workers,
            self.task,
            self.progress,
            self._check_card,
            self._show,
            packer.add if self.order.is_tarred else lambda shard: None,
            packer.is_done,
            # A service may delay low-priority orders for hours, or restart meanwhile.
            math.inf if self.order.through else self.order.stall_s,
        )

        def drive() -> None:
            try:
                driver.run(self._with_checked_files(self.job.shards()))
            finally:
                packer.leave(LEAVE_S)

        try:
            apart(drive, driver.stop, LEAVE_S)
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            self.progress.trouble = str(error) or self.progress.trouble
            self.status.end(self.progress, "interrupted" if is_interrupt else "stopped")
            raise
        return self._finish()

    def _check_card(self, card: ModelCard) -> None:
        """Record the first worker's engine; refuse a worker whose engine differs."""
        engine = engine_of(card)
        if self.job.engine:
            check_engine(engine, self.job.engine, self.order.is_mixed)
        else:
            self._keep(replace(self.job, engine=engine))

    def _with_checked_files(self, shards: Iterator[ShardPiece]) -> Iterator[ShardPiece]:
        """Record the files that rows name; stop the job if one has changed."""
        if self.order.through:
            yield from shards
            return
        self._keep(self.job.with_files(refiner_file(self.order)))
        catalogue = catalogue_for(self.order)
        for piece in shards:
            self._keep(self.job.with_files(files_in(piece, catalogue)))
            yield piece

    def _keep(self, job: BatchJob) -> None:
        if job != self.job:
            self.job = job
            self.store.put(FILE, job.as_json())

    def _show(self, progress: BatchProgress) -> None:
        self._check_lock()
        for show in self._shows:
            show(progress)

    def _finish(self) -> int:
        out = self.order.out
        facts = {"model": self.job.origin or self.job.model, "engine": self.job.engine}
        counts = results.write_results(self.store, self.progress, facts)
        self._show(self.progress)
        self.status.write(self.progress, "finished")
        self.store.tidy()
        self._close_display()
        if self.order.is_quiet:
            displays.print_json({"event": "finished", **counts, "out": out})
        else:
            took = timedelta(seconds=round(self.progress.now_s - self.progress.began_s))
            dead = counted(counts["dead_letters"], "dead letter")
            print(f"{out}: {counted(counts['images'], 'picture')}, {dead}, {took}")
            if counts["dead_letters"]:
                file = f"{out}/{results.DEAD_LETTERS}"
                print(f"sdxl batch: {file} lists the errors", file=sys.stderr)
        return HAS_DEAD if counts["dead_letters"] else 0
