"""Workers on fake engines: real threads and queues, with nothing to compute."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdxl.catalogue import Catalogue
from sdxl.checkpoint import find
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from serve.orders import Done, ImageOrder, Update
from serve.worker.worker import Worker
from tests.fakes import FakeEngine, FakeShelf, fake_engines


def fake_pipeline(tick_s: float = 0.0, buckets: tuple[int, ...] = (1, 2, 4)) -> Pipeline:
    engines = fake_engines(buckets)
    pipeline = Pipeline(find("mini"), engines)
    if tick_s:
        for name in ("unet_deep", "unet_shallow"):
            fake(pipeline, name).on_call = lambda: time.sleep(tick_s)
    return pipeline


def with_loras(*folders: Path) -> Pipeline:
    """A fake pipeline whose model has the LoRAs in these folders."""
    plain = fake_pipeline()
    engines = replace(plain.engines, adapters=FakeShelf())
    return replace(plain, engines=engines, catalogue=Catalogue(folders))


def fake(pipeline: Pipeline, network: str) -> FakeEngine:
    engine = pipeline.engines[network]
    assert isinstance(engine, FakeEngine)
    return engine


@contextmanager
def running(pipeline: Pipeline | None = None, **options: Any) -> Iterator[Worker]:
    worker = Worker(pipeline or fake_pipeline(), **options)
    worker.start()
    try:
        yield worker
    finally:
        worker.close()


def widen(worker: Worker, rows: int) -> None:
    """Allow as many rows in flight, whatever a busy machine measured."""
    loop = worker._started().denoiser.loop
    loop.limits = replace(loop.limits, rows=rows, crowded_rows=0)


def order(prompt: str = "a ring", seed: int = 1, *, steps: int = 4, **rest: Any) -> ImageOrder:
    """Make an order with alternating deep and shallow steps."""
    names = ("guidance", "width", "height", "negative_prompt", "scheduler", "cache_interval")
    given = {"cache_interval": 2, **{name: rest.pop(name) for name in names if name in rest}}
    return ImageOrder(GenerationParams(prompt, seed=seed, steps=steps, **given), **rest)


async def updates_of(worker: Worker, asked: ImageOrder) -> list[Update]:
    async with aclosing(worker.generate(asked)) as updates:
        return [update async for update in updates]


async def picture_of(worker: Worker, asked: ImageOrder) -> Done:
    done = (await updates_of(worker, asked))[-1]
    assert isinstance(done, Done)
    return done


async def end_of(worker: Worker, asked: ImageOrder) -> float:
    """Wait for the picture; return the time."""
    await picture_of(worker, asked)
    return time.perf_counter()


@asynccontextmanager
async def begun(worker: Worker) -> AsyncIterator[None]:
    """Run the block after the first of 500 steps of a picture; its end cancels the picture."""
    async with aclosing(worker.generate(order(steps=500, wants_progress=True))) as updates:
        async for update in updates:
            if getattr(update, "step", 0) > 0:
                break
        yield
