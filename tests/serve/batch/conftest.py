"""A Ray cluster for the tests that need processes, and a finished job."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from serve.batch.running import WorkerPool
from serve.batch.workers import ray_workers
from serve.cli import RAY_ENVIRONMENT
from tests.serve.batch.drawers import SMALL, make, prompts
from tests.serve.services import ROOT

OnRay = Callable[[Callable[[], Any]], WorkerPool]


@pytest.fixture(scope="session")
def on_ray() -> Iterator[OnRay]:
    """Return a function that makes a pool of Ray actors; its argument loads their renderers."""
    import ray

    os.environ.update(RAY_ENVIRONMENT)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )

    def with_load(load: Callable[[], Any]) -> WorkerPool:
        return lambda order, _, task: nullcontext(
            (ray_workers(load, task, False, 1), order.workers or 1)
        )

    yield with_load
    ray.shutdown()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts.txt of 30 rows, and its job in out/."""
    folder = tmp_path_factory.mktemp("job")
    assert make(prompts(folder, 30), folder / "out", *SMALL) == 0
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished`, for a test to change."""
    shutil.copytree(finished, tmp_path / "job")
    return tmp_path / "job"
