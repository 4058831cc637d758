"""One start of a job, from a checked order to its last file. It decides in which order things
happen; how is said in the modules it calls.
"""

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
from functools import partial
from typing import Any

from sdxl.handover import apart
from sdxl.presets import Presets, preset_named
from serve.batch import displays, reading, results, tars
from serve.batch.batch_spec import HAS_DEAD, BatchSpec
from serve.batch.driver import BatchFailed, Driver
from serve.batch.job import FILE, KEPT, BatchJob, load_job
from serve.batch.kinds import engine_of, refusal
from serve.batch.lock import LEAVE_S, locked
from serve.batch.packing import Packer
from serve.batch.places import open_store
from serve.batch.progress import BatchProgress
from serve.batch.renderers import HttpRenderer, load_local, service_card
from serve.batch.shard_worker import BatchTask
from serve.batch.store import Store, token
from serve.batch.workers import Load, StartWorker, ray_workers, thread_workers, threads_for
from serve.orders import ModelCard

WorkerPool = Callable[
    [BatchSpec, BatchJob, BatchTask], AbstractContextManager[tuple[StartWorker, int]]
]
"""Where workers come from, for the length of a job, and how many are wanted."""


def run(order: BatchSpec, pool: WorkerPool | None = None) -> int:
    """`pool` says where workers come from; as the order says unless given."""
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
            start_worker, workers = stack.enter_context(pool(order, job, task))
        except KeyboardInterrupt as error:
            raise tell_how_to_go_on(batch.progress, order) from error
        return batch.make(start_worker, workers)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class ToldInterrupt(KeyboardInterrupt):
    """The user knows how to go on."""


def tell_how_to_go_on(progress: BatchProgress, order: BatchSpec) -> ToldInterrupt:
    told = f"{progress.done} of {displays.counted(progress.rows, 'picture')} are in {order.out}"
    print(
        f"sdxl batch: interrupted; {told}. The same command goes on there; "
        f"sdxl batch --status {order.out} tells how far it is",
        file=sys.stderr,
        flush=True,
    )
    return ToldInterrupt()


def describe(order: BatchSpec, begun_with: Presets | None = None) -> BatchJob:
    """Everything about the job that can be known without a worker. Qualities mean what they did
    when it began, if it did."""
    paths = reading.find_inputs(order.inputs)
    if order.through is not None:
        card = service_card(order.through, order.key, order.model)
        presets = card.presets
        facts: dict[str, Any] = {"model": card.id, "model_sha256": "", "sizes": None}
    else:
        from engines.folders.digests import model_digest
        from sdxl.checkpoint import find

        checkpoint = find(order.model)
        presets = checkpoint.presets
        facts = {
            "model": checkpoint.name,
            "origin": checkpoint.origin,
            "model_sha256": model_digest(checkpoint),
            "sizes": vars(checkpoint.sizes),
        }
    return BatchJob(
        inputs=tuple(str(path.absolute()) for path in paths),
        input_sha256=reading.input_digest(paths),
        rows=reading.count(paths) * order.n,
        parameters=with_quality(order, begun_with or presets),
        presets=dict(presets),
        usual_interval=None,
        n=order.n,
        format=order.format,
        is_tarred=order.is_tarred,
        shard_size=order.shard_size,
        deterministic=order.deterministic,
        provenance="" if order.through else order.provenance.kind,
        engine={},
        threads=threads_for(max(order.workers, 1)),
        **facts,
    )


def with_quality(order: BatchSpec, presets: Presets) -> dict[str, Any]:
    """Flags of their own go before what the quality stands for."""
    if not order.quality:
        return dict(order.parameters)
    return preset_named(presets, order.quality).beside(order.parameters)


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

    from serve.cli import RAY_ENVIRONMENT

    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Without an address Ray might join what a killed job has left.
    ray.init(
        address=order.address or "local",
        include_dashboard=None if order.address else False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    # Ray sets a handler of its own, which would end this process at once.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        workers = order.workers or max(gpus, 1)
        exact = partial(
            load_local,
            order.model,
            order.backend,
            order.precision,
            order.engines,
            order.deterministic,
            order.provenance,
            order.takes_unchecked,
        )
        yield ray_workers(load or exact, task, gpus > 0, job.threads), workers
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
        shown = displays.Lines() if order.is_quiet else displays.Bar(job.rows)
        stack.callback(shown.close)
        self._shows: list[displays.Show] = [shown, self.status]
        if order.metrics_port is not None:
            metrics = displays.Metrics(order.metrics_port)
            stack.callback(metrics.close)
            self._shows.append(metrics)
        self._close_display = shown.close

    def make(self, start_worker: StartWorker, workers: int) -> int:
        packer = Packer(self._pack)
        driver = Driver(
            start_worker,
            workers,
            self.task,
            self.progress,
            self._meet,
            self._show,
            packer.add if self.order.is_tarred else ignore,
            packer.is_done,
            # A service may let low priority wait for hours, or restart meanwhile.
            math.inf if self.order.through else self.order.stall_s,
        )

        def drive() -> None:
            try:
                driver.run(self.job.shards())
            finally:
                packer.leave(LEAVE_S)

        try:
            apart(drive, driver.stop, LEAVE_S)
        except BaseException as error:
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped"
            self.progress.trouble = str(error) or self.progress.trouble
            self.status.end(self.progress, state)
            if state == "interrupted":
                raise tell_how_to_go_on(self.progress, self.order) from error
            raise
        return self._finish()

    def _meet(self, card: ModelCard) -> None:
        """The first worker says what computes; another must be like it."""
        engine = engine_of(card)
        if not self.job.engine:
            self.job = replace(self.job, engine=engine)
            self.store.put(FILE, self.job.as_json())
        elif why := refusal(engine, self.job.engine, self.order.is_mixed):
            raise BatchFailed(why)

    def _show(self, progress: BatchProgress) -> None:
        self._check_lock()
        for show in self._shows:
            show(progress)

    def _pack(self, shard: int) -> None:
        tars.pack(self.store, shard, self.task.run)

    def _finish(self) -> int:
        facts = {"model": self.job.origin or self.job.model, "engine": self.job.engine}
        counted = results.write_results(self.store, self.progress, facts)
        self.status.write(self.progress, "finished")
        self.store.tidy()
        self._close_display()
        told = {"event": "finished", **counted, "out": self.order.out}
        if self.order.is_quiet:
            displays.say(told)
        else:
            report(told, self.progress)
        return HAS_DEAD if counted["dead_letters"] else 0


def ignore(shard: int) -> None:
    """Single files need no packing."""


def report(told: dict[str, Any], progress: BatchProgress) -> None:
    took = displays.clock(progress.now_s - progress.began_s)
    made = displays.counted(told["images"], "picture")
    dead = displays.counted(told["dead_letters"], "dead letter")
    print(f"{told['out']}: {made}, {dead}, {took}")
    if told["dead_letters"]:
        where = f"{told['out']}/{results.DEAD_LETTERS}"
        print(f"sdxl batch: {where} says what went wrong", file=sys.stderr)
