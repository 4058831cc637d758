"""Renderers that draw instantly, and jobs on them, in threads of this process or on Ray."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sdxl.params import Sizes
from sdxl.picture_files import file_of
from serve.batch.batch_spec import BatchSpec
from serve.batch.command import build_parser, read_order
from serve.batch.job import BatchJob
from serve.batch.rows import ShardPiece
from serve.batch.running import run
from serve.batch.shard_worker import BatchTask, Tally, TurnReport
from serve.batch.workers import StartWorker, thread_workers
from serve.orders import Done, ImageOrder, ModelCard, Update

SIZES = Sizes(128, 64, 512)
SMALL = ("--shard-size", "8")
RAISES, DIES, HANGS = "a prompt that raises", "a prompt that kills", "a prompt that hangs"
STOPS = "a prompt that stops its process"


@dataclass
class Drawer:
    """A renderer that keeps its orders. A picture depends on its order alone. `log` gets a line for
    each picture."""

    log: str = ""
    draw_s: float = 0.0
    window: int = 8
    can_edit: bool = False
    orders: list[ImageOrder] = field(default_factory=list)
    made: int = 0
    busy: int = 0

    async def card(self) -> ModelCard:
        engines = {"backend": "drawer"}
        return ModelCard("sdxl-mini", SIZES, engines=engines, can_edit=self.can_edit)

    async def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        self.orders.append(order)
        self.busy += 1
        try:
            await asyncio.sleep(self.draw_s)
            await self._misbehave(order.params.prompt)
            data = draw(order)
        finally:
            self.busy -= 1
        self.made += 1
        if self.log:
            append_line(self.log, f"{os.getpid()} {order.params.seed}")
        yield Done(data, order.params, {"total_s": self.draw_s}, 1, 1, 77)

    async def _misbehave(self, prompt: str) -> None:
        if prompt == RAISES:
            raise RuntimeError("the engine does not like this one")
        if prompt == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == STOPS and not Path(f"{self.log}.stopped").exists():
            append_line(f"{self.log}.stopped", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        if prompt == HANGS:
            # The whole process hangs, as if a call never returned.
            time.sleep(10_000)

    def steps(self) -> int:
        return self.made

    def occupancy(self) -> float:
        return min(self.busy / self.window, 1.0)

    def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


@dataclass
class IdleWorker:
    """A BatchWorker without unfinished work."""

    name: str

    def ready(self) -> Future[ModelCard]:
        future: Future[ModelCard] = Future()
        future.set_result(ModelCard("m", SIZES))
        return future

    def turn(self, pieces: dict[int, ShardPiece]) -> Future[TurnReport]:
        ended = {key: Tally(made=len(piece.rows)) for key, piece in pieces.items()}
        future: Future[TurnReport] = Future()
        future.set_result(TurnReport({}, ended, True, len(pieces), 1.0))
        return future

    def end(self) -> None:
        pass


Editor = partial(Drawer, can_edit=True)


def draw(order: ImageOrder) -> bytes:
    params = order.params
    assert params.seed is not None
    colours = np.random.default_rng(params.seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    picture = Image.fromarray(colours).resize(params.result_size, Image.Resampling.NEAREST)
    if order.source is not None:
        picture = order.source.pasted(picture)
    return file_of(picture, order.format.upper())


def append_line(path: str, line: str) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@contextmanager
def in_threads(
    order: BatchSpec, job: BatchJob, task: BatchTask, load: Callable[[], Any] = Drawer
) -> Iterator[tuple[StartWorker, int]]:
    yield thread_workers(load, task), order.workers or 1


def order_of(source: Path, out: Path | str, *flags: str) -> BatchSpec:
    argv = [str(source), "--out", str(out), "--quiet", *flags]
    return read_order(build_parser().parse_args(argv))


def make(source: Path, out: Path | str, *flags: str, load: Callable[[], Any] = Drawer) -> int:
    return run(order_of(source, out, *flags), partial(in_threads, load=load))


def prompts(folder: Path, count: int, name: str = "prompts.txt") -> Path:
    path = folder / name
    path.write_text("".join(f"a red circle, number {i}\n" for i in range(count)))
    return path


def jsonl(folder: Path, rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pictures(out: Path) -> dict[str, bytes]:
    """Return all files below images/, by name."""
    root = out / "images"
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def ledger_of(out: Path) -> list[dict[str, Any]]:
    """Return all ledger lines, in the input's order."""
    texts = (path.read_text() for path in (out / "ledger").glob("*.jsonl"))
    entries = [json.loads(line) for text in texts for line in text.splitlines()]
    return sorted(entries, key=lambda entry: entry["ordinal"])


def parquet(folder: Path, rows: Any, name: str = "rows.parquet") -> Path:
    """Write a list of rows, or columns."""
    import pyarrow
    import pyarrow.parquet

    path = folder / name
    table = pyarrow.table(rows) if isinstance(rows, dict) else pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, path)
    return path


def dead_letters(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "dead_letter.jsonl").read_text().splitlines()]
