"""Chooses the replica of an order, or the front of a request: the one that will finish it first.

Every replica reports when one more picture would be ready. A router queries all twice a second and
adds what it has sent since, so that a burst spreads; a silent replica comes last.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextvars import Context
from dataclasses import replace
from typing import Any

import ray
from ray.serve._private.common import RequestMetadata, RequestProtocol
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from serve.fleet import liveness

log = logging.getLogger(__name__)

METHODS, STATS_METHOD = ("generate", "__call__"), "record_routing_stats"
"""The methods that use a replica's or a front's time, and the one that reports its load."""


class EarliestFinishRouter(FIFOMixin, RequestRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        self._sent: defaultdict[ReplicaID, deque[float]] = defaultdict(deque)
        self._reports: dict[ReplicaID, Mapping[str, float]] = {}
        self._liveness = liveness.of_deployment(self._deployment_id.name)
        self._asked: dict[ReplicaID, asyncio.Task[None]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._known: dict[ReplicaID, RunningReplica] = {}
        """the replicas that are queried: running, or leaving and not finished"""
        self._node = ray.get_runtime_context().get_node_id()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request and (self._asking is None or self._asking.done()):
            # In its own context: these queries are not part of that request.
            asking = self._keep_asking(pending_request.metadata)
            self._asking = asyncio.create_task(asking, context=Context())
        now = time.time()

        is_http = pending_request is not None and pending_request.metadata.is_http_request

        def rank(replica: RunningReplica) -> tuple[bool, bool, float, float]:
            id_ = replica.replica_id
            # A front elsewhere saves nothing; a replica elsewhere may be idle.
            is_far = is_http and replica.node_id != self._node
            stats = self._reports.get(id_, replica.routing_stats)
            is_silent = self._liveness.is_silent(id_.unique_id)
            return is_silent, is_far, ready_in_s(stats, self._sent[id_], now), random.random()

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        asked = pending_request.metadata
        if asked.call_method in METHODS:
            self._sent[replica_id].append(time.time())
        name = asked.request_id if asked.is_http_request else asked.internal_request_id
        if asked.is_http_request or asked.call_method in METHODS:
            self._liveness.took(name, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._sent.pop(replica_id, None)

    # -- which replicas answer --------------------------------------------------------------

    async def _keep_asking(self, like: RequestMetadata) -> None:
        """Query on the orders' connection, so that a dead connection shows."""
        while True:
            replicas, holders = dict(self.curr_replicas), self._liveness.holders
            leaving = {
                id_: replica
                for id_, replica in self._known.items()
                if id_ not in replicas and id_.unique_id in holders
            }
            self._known = {**replicas, **leaving}
            names, left = ({id_.unique_id for id_ in each} for each in (replicas, leaving))
            self._liveness.keep(names, left)
            if not self._known:
                # The next request asks again; a deleted deployment has none.
                return
            self._reports = {
                id_: report for id_, report in self._reports.items() if id_ in replicas
            }
            self._asked = {id_: task for id_, task in self._asked.items() if not task.done()}
            for id_, replica in self._known.items():
                # A hanging replica is not queried again before it has answered.
                if id_ not in self._asked:
                    self._asked[id_] = asyncio.create_task(self._ask(replica, like))
            await asyncio.sleep(liveness.ASK_PERIOD_S)

    async def _ask(self, replica: RunningReplica, like: RequestMetadata) -> None:
        id_, name = replica.replica_id, replica.replica_id.unique_id
        try:
            report = await self._send(replica, like)
        except Exception as error:
            log.debug("%s does not answer: %s", name, type(error).__name__)
            if id_ in self.curr_replicas:
                # Whatever it is instead: no order would fare better.
                self._liveness.lost(name)
            else:
                # It has left, or takes no more questions.
                self._known.pop(id_, None)
        else:
            self._reports[id_] = report
            self._liveness.note_answer(name)

    async def _send(self, replica: RunningReplica, like: RequestMetadata) -> Mapping[str, float]:
        own = f"{replica.replica_id.unique_id}-{time.monotonic_ns()}"
        metadata = replace(
            like,
            request_id=own,
            internal_request_id=own,
            call_method=STATS_METHOD,
            is_streaming=False,
            _request_protocol=RequestProtocol.UNDEFINED,
            tracing_context=None,
        )
        question = PendingRequest(args=[], kwargs={}, metadata=metadata, resolved=True)
        report: Mapping[str, float]
        report = await replica.try_send_request(question, with_rejection=False).get_async()
        return report


def ready_in_s(stats: Mapping[str, float], sent: deque[float], now: float) -> float:
    """Predict when a replica would be ready; its last report includes what was sent before."""
    if not stats:
        # New here: nothing is known, so only what was sent counts.
        return float(len(sent))
    while sent and sent[0] <= stats["at_s"]:
        sent.popleft()
    left_s = max(stats["ready_in_s"] - (now - stats["at_s"]), stats["alone_s"])
    return left_s + len(sent) * stats["each_s"]


TOLD_PERIOD_S = 10.0
"""Ray's controller asks, too, and sends what is new to every process that routes. It is of use only
until a router has asked by itself: half a second."""
_SETTINGS: dict[str, Any] = {
    "request_router_class": f"{__name__}:{EarliestFinishRouter.__name__}",
    "request_routing_stats_period_s": TOLD_PERIOD_S,
}
ROUTING = RequestRouterConfig(**_SETTINGS)
