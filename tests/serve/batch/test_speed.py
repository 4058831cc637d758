"""The cost of a job beyond its pictures: full calls, and the driver's memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sdxl.params import Sizes
from sdxl.provenance import OFF, Provenance
from serve.batch.driver import Driver
from serve.batch.intake import Intake
from serve.batch.progress import BatchProgress
from serve.batch.reading import read
from serve.batch.renderers import LocalRenderer
from serve.batch.shard_worker import BatchTask
from serve.batch.store import FolderStore
from tests.serve.batch.drawers import IdleWorker, make, pictures, prompts
from tests.serve.workers import fake, fake_pipeline


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
    # A guided image has two rows, and a call two images: 64 images are 32 calls a deep step.
    assert made == 0 and len(pictures(tmp_path / "out")) == 64
    assert len(calls) <= 2 * 32 * 1.1, f"{len(calls)} deep calls for 64 images, needed about 64"


def grown_mib(folder: Path, rows: int) -> float:
    """Return the growth of the driver's memory over an input of `rows` rows."""
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
    """Only the cache of the ids' database may grow."""
    grown_mib(tmp_path, 1000)
    small, large = (grown_mib(tmp_path, rows) for rows in (1_000_000, 10_000_000))
    print(f"1,000,000 rows: {small:.0f} MiB, 10,000,000 rows: {large:.0f} MiB")
    assert large <= 32, f"grew by {large:.0f} MiB, allowed 32"
    assert large <= small + 8
