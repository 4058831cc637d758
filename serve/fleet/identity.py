"""The name of this process's replica, and labels for its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def replica_name() -> str:
    from ray import serve as ray_serve

    return str(ray_serve.get_replica_context().replica_id.unique_id)


def labelled(metrics: Sequence[Any], **labels: str) -> Sequence[Any]:
    """Add these labels to each sample."""
    for metric in metrics:
        metric.samples = [s._replace(labels={**s.labels, **labels}) for s in metric.samples]
    return metrics
