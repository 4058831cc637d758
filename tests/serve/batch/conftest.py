"""One Ray for the tests that need true processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from serve.batch.crews import Hire, ray_hire
from serve.batch.job import Job
from serve.batch.order import Order
from serve.batch.running import Crew
from serve.batch.shard_worker import Task
from serve.cli import RAY_ENVIRONMENT
from tests.serve.services import ROOT

OnRay = Callable[[Callable[[], Any]], Crew]


@pytest.fixture(scope="session")
def on_ray() -> Iterator[OnRay]:
    """A crew of actors whose renderers are loaded so."""
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

    def with_load(load: Callable[[], Any]) -> Crew:
        @contextmanager
        def crew(order: Order, job: Job, task: Task) -> Iterator[tuple[Hire, int]]:
            yield ray_hire(load, task, False, 1), order.workers or 1

        return crew

    yield with_load
    ray.shutdown()
