"""The job's one loop: leases pieces to workers, counts results, replaces dead and hung workers.

The driver's state may be lost at any moment: the ledgers record what is done. It knows no Ray. It
runs on a thread without interrupts, which break futures; finished futures arrive in one queue.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from serve.batch import ledger
from serve.batch.batch_spec import BatchFailed
from serve.batch.leases import Leases
from serve.batch.progress import BatchProgress, WorkerState
from serve.batch.rows import BatchRow, ShardPiece, shard_name
from serve.batch.shard_worker import BatchTask, Tally, TurnReport
from serve.batch.workers import BatchWorker, StartWorker
from serve.orders import ModelCard

BEAT_S = 1.0
SILENT_S = 5.0
"""A ready worker without a report for this long hangs; it should report twice a second."""
LOAD_S = 1800.0
LOADS = 3
"""The job stops after this many consecutive workers died before they were ready, if no other worker
is ready: after the loss of a host, a new worker may wait for a GPU for ever."""
DAMAGED = "finished pictures were missing or damaged; --read-back reads all"


class Stopped(RuntimeError):
    """`stop` was called."""


@dataclass
class WorkerHandle:
    worker: BatchWorker
    since_s: float
    """time of its last progress"""
    silent_s: float = 0.0
    """seconds since its last report during which the driver listened"""
    progress: int = -1
    is_ready: bool = False
    tallies: dict[int, Tally] = field(default_factory=dict)


@dataclass
class Driver:
    start_worker: StartWorker
    workers: int
    task: BatchTask
    progress: BatchProgress
    on_card: Callable[[ModelCard], None]
    """called with the card of every worker; may raise"""
    show: Callable[[BatchProgress], None]
    on_shard: Callable[[int], None] = lambda shard: None
    """called when a shard is complete"""
    is_packed: Callable[[], bool] = lambda: True
    """whether all complete shards are packed; may raise"""
    stall_s: float = 120.0
    silent_s: float = SILENT_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._handles: dict[Future[Any], WorkerHandle] = {}
        self._news: SimpleQueue[Future[Any] | None] = SimpleQueue()
        self._names = (f"w{i}" for i in itertools.count())
        self._dead_loads = 0
        self._made = self._found = self._dead = 0
        """counts of ended pieces"""

    def run(self, shards: Iterator[ShardPiece]) -> None:
        self._leases = Leases(shards)
        try:
            for _ in range(self.workers):
                self._start()
            while not (self.is_packed() and self._leases.is_done):
                began_s = self.clock()
                futures = self._done_futures()
                listened_s = min(self.clock() - began_s, BEAT_S)
                for handle in self._handles.values():
                    handle.silent_s += listened_s
                for future in futures:
                    # The future of a replaced worker has no handle.
                    if future in self._handles:
                        self._handle(future, self._handles.pop(future))
                self._replace_stuck()
                self._show()
        finally:
            for handle in self._handles.values():
                handle.worker.end()

    def stop(self) -> None:
        """Make `run` raise Stopped soon. May be called from any thread, and in an interrupt."""
        self._news.put(None)

    def _done_futures(self) -> list[Future[Any]]:
        """Wait for a future at most BEAT_S, and return all that are done."""
        futures = []
        try:
            news = self._news.get(timeout=BEAT_S)
            while news is not None:
                futures.append(news)
                news = self._news.get_nowait()
        except Empty:
            return futures
        raise Stopped

    # -- workers ----------------------------------------------------------------------------

    def _start(self) -> None:
        handle = WorkerHandle(self.start_worker(next(self._names)), self.clock())
        self._await(handle.worker.ready(), handle)

    def _await(self, future: Future[Any], handle: WorkerHandle) -> None:
        self._handles[future] = handle
        handle.silent_s = 0.0
        future.add_done_callback(self._news.put)

    def _handle(self, future: Future[Any], handle: WorkerHandle) -> None:
        try:
            result = future.result()
        except Exception as error:
            self._replace(handle, last_line(error))
            return
        wants = True
        if isinstance(result, TurnReport):
            wants = result.wants
            self._record(result, handle)
        else:
            self.on_card(result)
            handle.is_ready, handle.since_s, self._dead_loads = True, self.clock(), 0
        lease = self._leases.lease_to(handle.worker.name) if wants else None
        self._await(handle.worker.turn(dict([lease] if lease else [])), handle)

    def _record(self, report: TurnReport, handle: WorkerHandle) -> None:
        if report.broken is not None:
            raise BatchFailed(f"{report.broken}; rerun the same command to resume")
        if report.progress != handle.progress or not self._is_busy(handle):
            handle.progress, handle.since_s = report.progress, self.clock()
        handle.tallies = report.held
        for key, tally in report.ended.items():
            piece = self._leases.held[key].piece
            self._add_counts(tally)
            if tally.damaged:
                shard = shard_name(piece.shard)
                self.progress.trouble = f"shard {shard}: {tally.damaged} {DAMAGED}"
            rows = [row for row in piece.rows if row.ordinal in tally.failed]
            error = next(iter(tally.failed.values()), "")
            self.progress.trouble = error or self.progress.trouble
            self._end(key, rows, error)
        state = self.progress.workers.setdefault(handle.worker.name, WorkerState(is_ready=True))
        state.occupancy = report.occupancy
        state.made += sum(t.made for t in report.ended.values())

    def _replace(self, handle: WorkerHandle, error: str) -> None:
        """End a worker and start another. The ledgers record what the old one has done."""
        name = handle.worker.name
        handle.worker.end()
        self.progress.workers.pop(name, None)
        self.progress.lost_workers += 1
        self.progress.trouble = f"{name}: {error}"
        if not handle.is_ready:
            self._dead_loads += 1
            is_any_ready = any(each.is_ready for each in self._handles.values())
            if self._dead_loads >= LOADS and not is_any_ready:
                raise BatchFailed(f"no worker could be started: {error}")
        for key, piece in self._leases.pieces_of(name):
            left, made = self._left(piece)
            self._add_counts(made)
            self._end(key, left, error)
        self._start()

    def _left(self, piece: ShardPiece) -> tuple[list[BatchRow], Tally]:
        """Return the rows that this run has not finished, and the counts of the others. A worker
        will check pictures of earlier runs."""
        known = ledger.read(self.task.store, shard_name(piece.shard))
        done = {n: entry for n, entry in known.items() if entry.run == self.task.run}
        left = [row for row in piece.rows if row.ordinal not in done]
        entries = [done[row.ordinal] for row in piece.rows if row.ordinal in done]
        dead = {e.ordinal: f"{e.line}: {e.error}" for e in entries if e.error is not None}
        return left, Tally(made=len(entries) - len(dead), dead=dead)

    def _end(self, key: int, left: Sequence[BatchRow], error: str) -> None:
        shard = self._leases.end(key, left, error)
        if shard is not None:
            self.on_shard(shard)

    def _replace_stuck(self) -> None:
        now = self.clock()
        for future, handle in list(self._handles.items()):
            allowed_s = self.stall_s if handle.is_ready else LOAD_S
            if handle.is_ready and handle.silent_s > self.silent_s:
                error = f"no report for {self.silent_s:g} s"
            elif self._is_busy(handle) and now - handle.since_s > allowed_s:
                error = f"no progress for {allowed_s:g} s"
            else:
                continue
            del self._handles[future]
            self._replace(handle, error)

    def _is_busy(self, handle: WorkerHandle) -> bool:
        """Whether it loads, or has rows."""
        return not handle.is_ready or bool(self._leases.keys_of(handle.worker.name))

    # -- counts -----------------------------------------------------------------------------

    def _add_counts(self, tally: Tally) -> None:
        """Add the counts of an ended piece. Reports contain the counts of running pieces."""
        self._made += tally.made
        self._found += tally.found
        self._dead += len(tally.dead)
        for error in tally.dead.values():
            self.progress.trouble = error

    def _show(self) -> None:
        live = [tally for handle in self._handles.values() for tally in handle.tallies.values()]
        self.progress.made = self._made + sum(tally.made for tally in live)
        self.progress.found = self._found + sum(tally.found for tally in live)
        self.progress.dead = self._dead + sum(len(tally.dead) for tally in live)
        self.progress.tick(self.clock())
        self.show(self.progress)


def last_line(error: Exception) -> str:
    """Return the last line of an error: Ray's errors contain a whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}"[:400] if lines else type(error).__name__
