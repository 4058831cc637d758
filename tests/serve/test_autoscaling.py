"""How many replicas a load needs: pure arithmetic over what replicas tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from serve.fleet.autoscaling import ByQueueTime, by_busy, how_many
from tests.serve.workers import begun, fake_pipeline, order, picture_of, running, widen


def wanted(busy: list[float], queue_s: list[float], target: int = 3) -> float:
    return wanted_by(ByQueueTime(target_s=2.0), target, busy=busy, queue_s=queue_s)


def wanted_by(policy: Any, target: int, **reports: list[float]) -> float:
    by_replica = {name: {str(i): v for i, v in enumerate(each)} for name, each in reports.items()}
    context = SimpleNamespace(aggregated_metrics=by_replica, target_num_replicas=target)
    return float(policy(context)[0])


@pytest.mark.parametrize(
    ("busy", "queue_s", "replicas"),
    [
        ([0.0, 0.0], [0.0, 0.0], 0),
        ([0.5, 0.4], [0.0, 0.0], 0.9),
        ([1.0, 1.0], [0.0, 0.0], 2),
        ([1.0, 1.0], [2.0, 2.0], 4),
        ([1.0, 0.0], [6.0, 0.0], 4),
    ],
)
def test_a_queue_adds_replicas(busy: list[float], queue_s: list[float], replicas: float) -> None:
    assert wanted(busy, queue_s) == pytest.approx(replicas)


def test_without_any_report_nothing_changes() -> None:
    assert wanted([], [], target=5) == 5


def test_without_a_reported_wait_replicas_follow_the_busy_ones() -> None:
    assert wanted_by(by_busy, 3, busy=[1.0, 2.5]) == 3.5
    assert wanted_by(by_busy, 3) == 3


@pytest.mark.parametrize(("policy", "arguments"), [(ByQueueTime, {"target_s": 2.0}), (by_busy, {})])
def test_ray_takes_a_named_policy(policy: Callable[..., Any], arguments: dict[str, float]) -> None:
    scaling = how_many(1, 3, policy, **arguments)["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert scaling.policy.get_policy().__name__ == policy.__name__
    assert scaling.policy.policy_kwargs == arguments


def test_without_an_upper_bound_there_are_always_the_fewest() -> None:
    assert how_many(2, 0, by_busy) == {"num_replicas": 2}


async def test_a_worker_tells_how_busy_it_is_and_how_long_its_queue() -> None:
    with running(fake_pipeline(tick_s=0.005, buckets=(1, 2))) as worker:
        widen(worker, rows=2)
        idle = worker.outlook()
        async with begun(worker, order(steps=500, wants_progress=True)):
            tasks = [asyncio.create_task(picture_of(worker, order(seed=i))) for i in range(4)]
            while len(worker._started().denoiser.waiting) < 4:
                await asyncio.sleep(0.01)
            full = worker.outlook()
        await asyncio.gather(*tasks)
    assert (idle.busy, idle.queue_s) == (0.0, 0.0)
    assert full.busy == 1.0 and full.queue_s / full.each_s == pytest.approx(4)
