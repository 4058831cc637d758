"""Which replica this process is, as a name and as a label of its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def replica_name() -> str:
    """Of the replica that this process is."""
    from ray import serve as ray_serve

    return str(ray_serve.get_replica_context().replica_id.unique_id)


def labelled(metrics: Sequence[Any], **labels: str) -> Sequence[Any]:
    """Each sample with these labels as well."""
    for metric in metrics:
        metric.samples = [s._replace(labels={**s.labels, **labels}) for s in metric.samples]
    return metrics
