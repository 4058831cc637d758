"""Chooses the number of replicas: enough for the arriving work, and more to work off the queue.

Ray Serve calls it; Ray's delays and bounds apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sdxl.fleet import QUEUE_S, WORK, replicas_needed

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

BUSY = "busy"
"""Reported by language models: the share of rows in use; a waiting request counts as busy."""
SCALING: dict[str, Any] = {
    "look_back_period_s": 20.0,
    "upscale_delay_s": 10.0,
    # Loading a replica takes long, so a recently needed one stays.
    "downscale_delay_s": 300.0,
}


def how_many(
    fewest: int, most: int, policy: Callable[..., Any], **arguments: float
) -> dict[str, Any]:
    """Return a deployment's options. Without an upper bound `most` the number is fixed."""
    if not most:
        return {"num_replicas": fewest}
    # Imported here, so that replicas do not load Ray's configuration models.
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    named = AutoscalingPolicy(
        policy_function=f"{__name__}:{policy.__name__}", policy_kwargs=arguments
    )
    scaling = AutoscalingConfig(min_replicas=fewest, max_replicas=most, policy=named, **SCALING)
    return {"autoscaling_config": scaling}


class ByWork:
    """Scales by the arriving work, so that the queue is worked off within `target_s`. Before the
    first report the number stays."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        arriving, waiting = (reported(context, name) for name in (WORK, QUEUE_S))
        if not arriving:
            return context.target_num_replicas, {}
        return replicas_needed(arriving, waiting, self.target_s), {}


def by_busy(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Scale by the share of busy rows. Before the first report the number stays."""
    busy = reported(context, BUSY)
    return (sum(busy) if busy else context.target_num_replicas), {}


def reported(context: AutoscalingContext, name: str) -> list[float]:
    return list((context.aggregated_metrics or {}).get(name, {}).values())
