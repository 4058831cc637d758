"""How many replicas a load needs: pure arithmetic over what replicas tell."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingPolicy

from serve.fleet.autoscaling import ByQueueTime
from serve.worker.worker import Worker
from tests.serve.workers import begun, fake_pipeline, order, picture_of, running, widen


def wanted(busy: list[float], queue_s: list[float], target: int = 3) -> float:
    told = {
        "busy": {str(i): value for i, value in enumerate(busy)},
        "queue_s": {str(i): value for i, value in enumerate(queue_s)},
    }
    context = SimpleNamespace(aggregated_metrics=told, target_num_replicas=target)
    return ByQueueTime(target_s=2.0)(context)[0]  # type: ignore[arg-type]


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
def test_busy_ones_stay_and_a_queue_asks_for_more(
    busy: list[float], queue_s: list[float], replicas: float
) -> None:
    assert wanted(busy, queue_s) == pytest.approx(replicas)


def test_before_anyone_has_spoken_nothing_changes() -> None:
    assert wanted([], [], target=5) == 5


def test_ray_takes_it_by_its_name() -> None:
    policy = AutoscalingPolicy(
        policy_function="serve.fleet.autoscaling:ByQueueTime", policy_kwargs={"target_s": 2.0}
    )
    assert policy.get_policy()(**policy.policy_kwargs).target_s == 2.0


def test_a_worker_tells_how_busy_it_is_and_how_long_its_queue() -> None:
    async def scenario(worker: Worker) -> tuple[float, float]:
        async with begun(worker, order(steps=500, wants_progress=True)):
            waiting = [asyncio.create_task(picture_of(worker, order(seed=i))) for i in range(4)]
            while len(worker._started().denoiser.waiting) < 4:
                await asyncio.sleep(0.01)
            told = worker.outlook()
        await asyncio.gather(*waiting)
        return told.busy, told.queue_s / told.each_s

    with running(fake_pipeline(tick_s=0.005, buckets=(1, 2))) as worker:
        widen(worker, rows=2)
        idle = worker.outlook()
        busy, waiting = asyncio.run(scenario(worker))
    assert (idle.busy, idle.queue_s) == (0.0, 0.0)
    assert busy == 1.0 and waiting == pytest.approx(4)
