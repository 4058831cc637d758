"""The cost of a job beyond its pictures: throughput, scaling, and the driver's memory."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from sdxl.params import GenerationParams, Sizes
from sdxl.pipeline import Pipeline
from sdxl.provenance import OFF, Provenance
from serve.batch.driver import Driver
from serve.batch.intake import Intake
from serve.batch.progress import BatchProgress
from serve.batch.reading import read
from serve.batch.renderers import LocalRenderer
from serve.batch.running import run
from serve.batch.shard_worker import BatchTask
from serve.batch.store import FolderStore
from tests.serve.batch.conftest import OnRay
from tests.serve.batch.drawers import IdleWorker, make, order_of, pictures, prompts
from tests.serve.workers import fake, fake_pipeline

TICK_S = 0.02


def sleepy() -> Pipeline:
    """Engines that sleep instead of computing: two real ones would share this machine's cores."""
    return fake_pipeline(TICK_S, buckets=(4,))


def sleepy_renderer() -> LocalRenderer:
    return LocalRenderer(sleepy(), Provenance(OFF))


def test_calls_of_the_network_are_full_across_shards(tmp_path: Path) -> None:
    """64 rows in 8 shards: only the last few calls may have free rows."""
    pipeline = fake_pipeline(0.002, buckets=(4,))
    renderer = LocalRenderer(pipeline, Provenance(OFF))
    calls = fake(pipeline, "unet_deep").calls
    calls.clear()
    made = make(
        prompts(tmp_path, 64), tmp_path / "out", "--shard-size", "8", "--steps", "4",
        "--cache-interval", "2", load=lambda: renderer,
    )  # fmt: skip
    # Two rows an image under guidance, two images a call: 64 images are 32 calls a deep step.
    assert made == 0 and len(pictures(tmp_path / "out")) == 64
    assert len(calls) <= 2 * 32 * 1.1, f"{len(calls)} deep calls for 64 images, needed about 64"


@pytest.mark.long
def test_throughput_equals_that_of_the_loop_in_process(tmp_path: Path) -> None:
    rows, pipeline = 200, sleepy()
    began = time.perf_counter()
    results = pipeline.generate([GenerationParams("a", seed=i, steps=10) for i in range(rows)])
    alone = rows / (time.perf_counter() - began)
    assert not any(result.error for result in results)
    renderer = LocalRenderer(sleepy(), Provenance(OFF))
    began = time.perf_counter()
    make(prompts(tmp_path, rows), tmp_path / "out", "--steps", "10", load=lambda: renderer)
    job = rows / (time.perf_counter() - began)
    print(f"in process {alone:.2f} images/s, as a job {job:.2f}: {job / alone:.1%}")
    assert job >= 0.97 * alone, f"{job / alone:.1%} of the loop's throughput, needed 97%"


@pytest.mark.long
def test_two_workers_make_nearly_twice_as_much(on_ray: OnRay, tmp_path: Path) -> None:
    rates = []
    for workers in (1, 2):
        source, out = prompts(tmp_path, 240), tmp_path / f"out{workers}"
        flags = ("--steps", "10", "--shard-size", "16", "--workers", str(workers))
        order = order_of(source, out, *flags)
        assert run(order, on_ray(sleepy_renderer)) == 0
        stamps = sorted(path.stat().st_mtime for path in out.glob("images/*/*.png"))
        # Between the first quarter, when every worker is loaded, and the last.
        rates.append((len(stamps) // 2) / (stamps[-len(stamps) // 4] - stamps[len(stamps) // 4]))
    print(f"one worker {rates[0]:.2f} images/s, two {rates[1]:.2f}: {rates[1] / rates[0]:.2f} x")
    assert rates[1] >= 1.9 * rates[0], f"{rates[1] / rates[0]:.2f} x, needed 1.9"


def grown_mib(folder: Path, rows: int) -> float:
    """Return the growth of the driver's memory over an input of so many rows."""
    source = folder / f"{rows}.txt"
    with source.open("w") as file:
        file.writelines(f"a red circle number {i}\n" for i in range(rows))
    store = FolderStore(folder / "out", "run")
    progress = BatchProgress(rows, 0.0)
    here, highest = psutil.Process(), 0
    before = here.memory_info().rss

    def show(progress: BatchProgress) -> None:
        nonlocal highest
        highest = max(highest, here.memory_info().rss)

    driver = Driver(
        IdleWorker, 8, BatchTask(store, "run", "png"), progress, lambda card: None, show
    )
    intake = Intake({}, 1, "m", Sizes(128, 64, 512), "png")
    driver.run(intake.shards(read([source]), 128))
    source.unlink()
    assert progress.made == rows
    return (highest - before) / 2**20


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_drivers_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Only the cache of the database of ids may grow."""
    grown_mib(tmp_path, 1000)
    small, large = (grown_mib(tmp_path, rows) for rows in (1_000_000, 10_000_000))
    print(f"1,000,000 rows: {small:.0f} MiB, 10,000,000 rows: {large:.0f} MiB")
    assert large <= 32, f"grew by {large:.0f} MiB, allowed 32"
    assert large <= small + 8
