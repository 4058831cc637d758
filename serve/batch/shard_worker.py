"""One worker of a job: rows of its shards in, pictures and ledger lines out.

It keeps its renderer busy across shards, and skips rows that the ledger lists with a sound file. So
new jobs, resumed jobs and shards of dead workers are all the same to it. It knows no Ray.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from sdxl.files import OutputError
from serve.batch import ledger
from serve.batch.finished import FinishedPictures
from serve.batch.job import engine_label, engine_of
from serve.batch.ledger import MAX_TEXT, Entry
from serve.batch.renderers import Renderer, RendererLost
from serve.batch.row_pictures import order_of
from serve.batch.rows import BatchRow, ShardPiece, shard_name, stem_of
from serve.batch.store import FileAppender, PartAppender, Store
from serve.batch.tars import LOOSE
from serve.errors import Problem
from serve.orders import Done, ImageOrder, ModelCard
from serve.render.destination import SUFFIXES

BEAT_S = 0.5
"""A worker reports at least this often."""
UNHEARD_S = 2.5
"""A worker without a turn for this long writes nothing: after twice that time (SILENT_S in
driver.py) the driver leases its rows to another worker, even if only the network failed."""
FILE_THREADS = 8
"""Many, since an object store answers slowly."""
TRY_AGAIN = (408, 429)
"""Statuses of refusals that the row did not cause."""
Appender = FileAppender | PartAppender
Load = Callable[[], Renderer]
"""Called in the worker's process."""


@dataclass(frozen=True)
class BatchTask:
    """The settings that all workers of one run share."""

    store: Store
    run: str
    format: str
    is_tarred: bool = False
    retries_dead: bool = False
    reads_back: bool = False
    """check every finished picture instead of a sample"""


@dataclass
class Tally:
    """The progress of one piece."""

    made: int = 0
    found: int = 0
    damaged: int = 0
    """finished earlier, but missing or different from the ledger now"""
    dead: dict[int, str] = field(default_factory=dict)
    """lines and errors of dead letters by ordinal"""
    failed: dict[int, str] = field(default_factory=dict)
    """errors of rows to retry by ordinal"""


@dataclass(frozen=True)
class TurnReport:
    """A worker's report at the end of a turn. Tallies are by lease."""

    held: dict[int, Tally]
    ended: dict[int, Tally]
    wants: bool
    """whether the worker can take more rows"""
    progress: int
    """a count that rises while anything advances"""
    occupancy: float
    broken: str | None = None
    """why the job must stop"""


class ShardWorker:
    def __init__(self, load: Load, task: BatchTask, name: str) -> None:
        self.renderer, self.task, self.name = load(), task, name
        self._finished = FinishedPictures(task.store, task.reads_back, f"{task.run} {name}")
        self._engine = ""
        self._window = asyncio.Semaphore(self.renderer.window)
        self._threads = ThreadPoolExecutor(FILE_THREADS, "files")
        self._held: dict[int, Tally] = {}
        self._ended: dict[int, Tally] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._not_begun = 0
        self._progress = 0
        self._broken: str | None = None
        self._turn_s = time.monotonic()

    async def card(self) -> ModelCard:
        card = await self.renderer.card()
        # The card of a service sets the window; no row has begun yet.
        self._window = asyncio.Semaphore(self.renderer.window)
        self._engine = engine_label(engine_of(card))
        return card

    async def turn(self, pieces: dict[int, ShardPiece]) -> TurnReport:
        """Begin more pieces; report at the next event, or after BEAT_S."""
        self._turn_s = time.monotonic()
        self.renderer.check()
        for key, piece in pieces.items():
            self._held[key] = Tally()
            self._not_begun += len(piece.rows)
            task = asyncio.create_task(self._work(key, piece))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if pieces and self._wants_rows:
            self._news.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._news.wait()
        self._news.clear()
        ended, self._ended = self._ended, {}
        return TurnReport(
            dict(self._held),
            ended,
            self._wants_rows,
            self.renderer.steps() + self._progress,
            self.renderer.occupancy(),
            self._broken,
        )

    async def close(self) -> None:
        await self.renderer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _wants_rows(self) -> bool:
        return self._not_begun < self.renderer.window

    def _count_begun(self, rows: int) -> None:
        had_enough = not self._wants_rows
        self._not_begun -= rows
        if had_enough and self._wants_rows:
            self._news.set()

    # -- a piece ----------------------------------------------------------------------------

    async def _work(self, key: int, piece: ShardPiece) -> None:
        tally = self._held[key]
        try:
            missing = await self._missing(piece, tally)
            tally.found = len(piece.rows) - len(missing)
            self._count_begun(tally.found)
            await self._make_all(piece.shard, missing, tally)
        except (OutputError, RendererLost) as error:
            self._broken = str(error)
        except Exception as error:
            # The output failed, or the program: other rows would fail too.
            self._broken = f"{type(error).__name__}: {error}"
        del self._held[key]
        self._ended[key] = tally
        self._news.set()

    async def _make_all(self, shard: int, rows: Sequence[BatchRow], tally: Tally) -> None:
        if not rows:
            return
        writer = self.task.store.append(shard_name(shard))
        try:
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    group.create_task(self._make(shard, row, writer, tally))
        except* Exception as errors:
            raise errors.exceptions[0] from errors
        finally:
            await self._in_thread(writer.close)

    async def _missing(self, piece: ShardPiece, tally: Tally) -> list[BatchRow]:
        name = shard_name(piece.shard)
        known = await self._in_thread(ledger.read, self.task.store, name)
        entries = [e for row in piece.rows if (e := known.get(row.ordinal)) and e.id == row.id]
        pictures = [entry for entry in entries if entry.error is None]
        sound = await self._in_thread(self._finished.find_sound, pictures, self._count_progress)
        tally.damaged = len(pictures) - len(sound)
        dead = [entry for entry in entries if entry.error is not None]
        if self.task.retries_dead:
            dead = [entry for entry in dead if entry.run == self.task.run]
        done = {entry.ordinal for entry in (*sound, *dead)}
        return [row for row in piece.rows if row.ordinal not in done]

    def _count_progress(self) -> None:
        self._progress += 1

    # -- a row ------------------------------------------------------------------------------

    async def _make(self, shard: int, row: BatchRow, writer: Appender, tally: Tally) -> None:
        async with self._window:
            self._count_begun(1)
            if row.params is None or row.error is not None:
                reason = row.error or "no parameters"
                await self._give_up(row, reason, row.problem, writer, tally)
                return
            try:
                order = await self._order(row)
                done = await self._picture(order)
            except RendererLost:
                raise
            except Exception as error:
                # The worker hides the cause from clients, but this goes to the operator's file.
                cause = error.__context__ or error
                if isinstance(error, Problem) and is_final(error):
                    await self._give_up(row, str(cause), error, writer, tally)
                else:
                    tally.failed[row.ordinal] = f"{type(cause).__name__}: {cause}"
                return
            origin = {} if order.source is None else dict(order.source.digests)
            await self._wait_for_turn()
            entry = await self._in_thread(self._store_picture, shard, row, done, origin)
            await self._record(entry, writer)
            self._count_progress()
            tally.made += 1

    async def _order(self, row: BatchRow) -> ImageOrder:
        assert row.params is not None
        if row.image is None and not row.maps:
            return ImageOrder(row.params, row.format or self.task.format, row.compression)
        card = await self.renderer.card()
        order: ImageOrder = await self._in_thread(order_of, row, self.task.format, card)
        return order

    async def _picture(self, order: ImageOrder) -> Done:
        async with aclosing(self.renderer.generate(order)) as updates:
            async for update in updates:
                if isinstance(update, Done):
                    return update
        raise Problem(500, "the renderer returned no picture")

    def _store_picture(
        self, shard: int, row: BatchRow, done: Done, origin: dict[str, str]
    ) -> Entry:
        assert done.params.seed is not None
        began = time.perf_counter()
        folder = LOOSE if self.task.is_tarred else "images"
        suffix = SUFFIXES[row.format or self.task.format]
        file = f"{folder}/{shard_name(shard)}/{stem_of(row.id)}{suffix}"
        self.task.store.put(file, done.image)
        timings = {**done.timings, "store_s": time.perf_counter() - began}
        return self._entry(
            row,
            file=file,
            sha256=hashlib.sha256(done.image).hexdigest(),
            size=len(done.image),
            seed=done.params.seed,
            params=done.params.as_dict(),
            origin=origin,
            timings={name: round(seconds, 6) for name, seconds in timings.items()},
            engine=self._engine,
            prompt_tokens=done.prompt_tokens,
        )

    def _entry(self, row: BatchRow, **facts: Any) -> Entry:
        run, worker = self.task.run, self.name
        return Entry(row.ordinal, row.id, row.line, run, worker=worker, **facts)

    async def _give_up(
        self, row: BatchRow, error: str, problem: Problem | None, writer: Appender, tally: Tally
    ) -> None:
        facts = problem.as_dict() if problem else {}
        facts = {k: v[:MAX_TEXT] if isinstance(v, str) else v for k, v in facts.items()}
        error = error[:MAX_TEXT]
        await self._record(self._entry(row, error=error, problem=facts), writer)
        tally.dead[row.ordinal] = f"{row.line}: {error}"

    async def _record(self, entry: Entry, writer: Appender) -> None:
        # A slow disk may have taken so long for a picture that another worker has the rows now.
        await self._wait_for_turn()
        await self._in_thread(writer.add, entry.as_line())

    async def _wait_for_turn(self) -> None:
        """Wait while another worker may have the rows."""
        while time.monotonic() - self._turn_s > UNHEARD_S:
            await asyncio.sleep(BEAT_S)

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)


def is_final(problem: Problem) -> bool:
    return 400 <= problem.status < 500 and problem.status not in TRY_AGAIN
