"""How many replicas there should be: as many as are busy, and as many more as would work off what
waits within a given time. Ray Serve asks; its own delays and bounds then hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

BUSY, QUEUE_S = "busy", "queue_s"
"""What every replica tells: the share of its rows that run, and how long a newcomer would wait."""


class ByQueueTime:
    def __init__(self, target_s: float) -> None:
        self.target_s = target_s

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        told = context.aggregated_metrics or {}
        busy, queue_s = (list(told.get(name, {}).values()) for name in (BUSY, QUEUE_S))
        if not busy:
            # Nobody has spoken yet.
            return context.target_num_replicas, {}
        return sum(busy) + sum(queue_s) / self.target_s, {}
