"""Which replica gets an order: the one that will finish it first.

Every replica publishes now and then when one more would be ready. Between two such words, a router
adds what it has itself sent since, so that a burst spreads. It knows neither pictures nor texts.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

METHOD = "generate"
"""the one call that takes a replica's time"""


class EarliestFinishRouter(FIFOMixin, RequestRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        self._sent: defaultdict[ReplicaID, deque[float]] = defaultdict(deque)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        now = time.time()

        def rank(replica: RunningReplica) -> tuple[float, float]:
            stats, sent = replica.routing_stats, self._sent[replica.replica_id]
            return ready_in_s(stats, sent, now), random.random()

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        if pending_request.metadata.call_method == METHOD:
            self._sent[replica_id].append(time.time())

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._sent.pop(replica_id, None)


def ready_in_s(stats: Mapping[str, float], sent: deque[float], now: float) -> float:
    """Forgets what was sent before the replica spoke: its word includes that."""
    if not stats:
        # New here: nothing is known, so only what was sent counts.
        return float(len(sent))
    while sent and sent[0] <= stats["at_s"]:
        sent.popleft()
    left_s = max(stats["ready_in_s"] - (now - stats["at_s"]), stats["alone_s"])
    return left_s + len(sent) * stats["each_s"]


_SETTINGS: dict[str, Any] = {
    "request_router_class": f"{__name__}:{EarliestFinishRouter.__name__}",
    "request_routing_stats_period_s": 0.5,
}
ROUTING = RequestRouterConfig(**_SETTINGS)
