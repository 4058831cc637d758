"""The number of replicas for a load, computed from the replicas' reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from serve.fleet.autoscaling import ByWork, by_busy, how_many
from tests.serve.workers import begun, fake_pipeline, order, picture_of, running, widen


def wanted(policy: Any, **reports: list[float]) -> float:
    """Return the number of replicas where there are 3 now."""
    by_replica = {name: {str(i): v for i, v in enumerate(each)} for name, each in reports.items()}
    context = SimpleNamespace(aggregated_metrics=by_replica, target_num_replicas=3)
    return float(policy(context)[0])


@pytest.mark.parametrize(
    ("work", "queue_s", "replicas"),
    [
        ([], [], 3),
        ([0.0, 0.0], [0.0, 0.0], 0),
        ([0.5, 0.3], [0.0, 0.0], 1),
        ([0.8, 0.8], [0.0, 0.0], 2),
        ([0.8, 0.8], [2.0, 2.0], 4),
        ([1.6, 1.6], [0.0, 0.0], 4),
    ],
)
def test_replicas_follow_the_arriving_work_and_the_queue(
    work: list[float], queue_s: list[float], replicas: float
) -> None:
    found = wanted(ByWork(target_s=2.0), work=work, queue_s=queue_s)
    assert found == pytest.approx(replicas)


def test_without_a_reported_wait_replicas_follow_the_busy_ones() -> None:
    assert wanted(by_busy, busy=[1.0, 2.5]) == 3.5
    assert wanted(by_busy) == 3


@pytest.mark.parametrize(("policy", "arguments"), [(ByWork, {"target_s": 2.0}), (by_busy, {})])
def test_ray_takes_a_named_policy(policy: Callable[..., Any], arguments: dict[str, float]) -> None:
    scaling = how_many(1, 3, policy, **arguments)["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert scaling.policy.get_policy().__name__ == policy.__name__
    assert scaling.policy.policy_kwargs == arguments


def test_without_an_upper_bound_there_are_always_the_fewest() -> None:
    assert how_many(2, 0, by_busy) == {"num_replicas": 2}


async def test_a_worker_reports_the_work_that_arrived_and_that_waits() -> None:
    with running(fake_pipeline(tick_s=0.005, buckets=(1, 2))) as worker:
        widen(worker, rows=2)
        each_s = worker.outlook().each_s
        assert worker.demand() == {"work": 0.0, "queue_s": 0.0}
        async with begun(worker):
            tasks = [asyncio.create_task(picture_of(worker, order(seed=i))) for i in range(4)]
            while len(worker._started().denoiser.waiting) < 4:
                await asyncio.sleep(0.01)
            full = worker.demand()
        await asyncio.gather(*tasks)
    assert full["queue_s"] > 0 < each_s
    assert full["work"] > full["queue_s"], "the running one arrived, too"
