"""Chooses the replica for an order, or the front end for a request: the one that will finish first.

A replica reports when one more picture would be ready. A router queries replicas four times a
second and adds what it has sent since, so that a burst spreads; silent replicas come last.
sdxl/fleet.py decides; `sdxl bench fleet` shows how well, up to 10,000 replicas.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextvars import Context
from dataclasses import replace
from typing import Any

import numpy as np
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

from sdxl.fleet import ASK_PERIOD_S, ASKED, Loads, hashed, homes, replicas_to_ask
from serve.fleet import liveness
from serve.orders import ImageOrder, KeptFile

log = logging.getLogger(__name__)

METHODS, STATS_METHOD = ("generate", "__call__"), "record_routing_stats"
"""The methods that use a replica's or a front end's time, and the method that reports its load."""
REPORTED = ("ready_in_s", "alone_s", "each_s")
"""The fields of sdxl.fleet.Outlook."""
MOST_FILES = 2000
"""Files whose homes are cached."""


class LoadTable:
    """The current replicas and their reports. A change of replicas makes a new table."""

    def __init__(self, replicas: Sequence[RunningReplica], before: LoadTable | None = None) -> None:
        self.replicas = replicas
        self.places = {each.replica_id: place for place, each in enumerate(replicas)}
        self.loads = Loads(len(replicas))
        self.answered: Any = np.arange(len(replicas))
        """places of the replicas that may get orders"""
        self._homes: dict[str, Any] = {}
        self._hashes: Any = None
        for place, each in enumerate(replicas):
            old = before.places.get(each.replica_id) if before else None
            if before and old is not None:
                self.loads.copy(place, before.loads, old)
            elif each.routing_stats:
                self.report(each.replica_id, time.monotonic(), each.routing_stats)

    def homes(self, file: str) -> Any:
        """Return the places of the replicas that keep a file."""
        if self._hashes is None:
            names = [each.replica_id.unique_id for each in self.replicas]
            self._hashes = np.array([hashed(name) for name in names], np.uint64)
        if file not in self._homes:
            if len(self._homes) >= MOST_FILES:
                self._homes.clear()
            self._homes[file] = homes(hashed(file), self._hashes)
        return self._homes[file]

    def sent(self, id_: ReplicaID) -> float:
        place = self.places.get(id_)
        return 0.0 if place is None else float(self.loads.sent[place])

    def note_sent(self, id_: ReplicaID) -> None:
        if id_ in self.places:
            self.loads.sent[self.places[id_]] += 1

    def report(
        self, id_: ReplicaID, now: float, report: Mapping[str, float], included: float = 0.0
    ) -> None:
        if id_ in self.places and report:
            outlook = [report[name] for name in REPORTED]
            self.loads.report(self.places[id_], now, outlook, included)

    def take_answers(self, since_s: float) -> None:
        """Let orders go only to the replicas that were queried since then and answered."""
        answered = np.flatnonzero(self.loads.known_s >= since_s)
        if len(answered):
            self.answered = answered

    def ranked(
        self, places: Any, now: float, file: KeptFile | None, rng: np.random.Generator
    ) -> list[RunningReplica]:
        """Return a few of these replicas in order of when they will be ready."""
        kept = self.homes(file.name) if file else np.arange(0)
        delay_s = file.loading_s if file else 0.0
        few, ready_s = self.loads.candidates(places[None], now, kept[None], delay_s, rng)
        order = dict.fromkeys(few[0][ready_s[0].argsort()].tolist())
        return [self.replicas[place] for place in order]


class EarliestFinishRouter(FIFOMixin, RequestRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        self._table = LoadTable(())
        self._rng = np.random.default_rng()
        self._liveness = liveness.of_deployment(self._deployment_id.name)
        self._queries: dict[ReplicaID, asyncio.Task[None]] = {}
        self._query_task: asyncio.Task[None] | None = None
        self._known: dict[ReplicaID, RunningReplica] = {}
        """the queried replicas: running ones, and leaving ones that still have orders"""
        self._node = ray.get_runtime_context().get_node_id()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request and (self._query_task is None or self._query_task.done()):
            # In a new context: these queries are not part of this request.
            asking = self._query_periodically(pending_request.metadata)
            self._query_task = asyncio.create_task(asking, context=Context())
        if candidate_replicas is not self._table.replicas:
            self._table = LoadTable(candidate_replicas, self._table)
        table, now = self._table, time.monotonic()
        places, file = table.answered, None
        if pending_request is not None and pending_request.metadata.is_http_request:
            # A front end on this node is as good as any; for replicas, load matters more.
            places = self._places_on_node(table)
        elif pending_request is not None:
            order = pending_request.args[0] if pending_request.args else None
            file = order.kept_file if isinstance(order, ImageOrder) else None
        ranked = table.ranked(places, now, file, self._rng)
        if all(map(self._is_silent, ranked)):
            answering = [
                place for place, each in enumerate(table.replicas) if not self._is_silent(each)
            ]
            others = np.array(answering) if answering else table.answered
            ranked = table.ranked(others, now, None, self._rng)
        return [[replica] for replica in sorted(ranked, key=self._is_silent)]

    def _places_on_node(self, table: LoadTable) -> Any:
        near = [
            place
            for place, each in enumerate(table.replicas)
            if each.node_id == self._node and not self._is_silent(each)
        ]
        return np.array(near) if near else table.answered

    def _is_silent(self, replica: RunningReplica) -> bool:
        return self._liveness.is_silent(replica.replica_id.unique_id)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        asked = pending_request.metadata
        if asked.call_method in METHODS:
            self._table.note_sent(replica_id)
        name = asked.request_id if asked.is_http_request else asked.internal_request_id
        if asked.is_http_request or asked.call_method in METHODS:
            self._liveness.note_holder(name, replica_id.unique_id)

    # -- queries ----------------------------------------------------------------------------

    async def _query_periodically(self, like: RequestMetadata) -> None:
        """Query replicas periodically, over the orders' connections, which reveals dead ones."""
        while True:
            replicas, holders = dict(self.curr_replicas), self._liveness.holders
            names = {id_.unique_id for id_ in replicas}
            drawn = self._choose_queried(replicas, holders)
            leaving = {
                id_: replica
                for id_, replica in self._known.items()
                if id_ not in replicas and id_.unique_id in holders
            }
            self._known = {**drawn, **leaving}
            asked, left = ({id_.unique_id for id_ in each} for each in (drawn, leaving))
            self._liveness.keep(asked, left, len(names))
            if not self._known:
                # The next request starts the queries again; a deleted deployment gets none.
                return
            self._queries = {id_: task for id_, task in self._queries.items() if not task.done()}
            began_s = time.monotonic()
            for id_, replica in self._known.items():
                # A hanging replica is not queried again before it has answered.
                if id_ not in self._queries:
                    self._queries[id_] = asyncio.create_task(self._query(replica, like))
            await asyncio.sleep(ASK_PERIOD_S)
            if len(replicas) > ASKED:
                self._table.take_answers(began_s)

    def _choose_queried(
        self, replicas: Mapping[ReplicaID, RunningReplica], holders: set[str]
    ) -> dict[ReplicaID, RunningReplica]:
        """Choose the replicas to query in this period: all, or a random few and those with orders
        if there are many."""
        if len(replicas) <= ASKED:
            return dict(replicas)
        each = list(replicas.items())
        drawn = {each[i][0]: each[i][1] for i in replicas_to_ask(len(each), 1, self._rng)[0]}
        return drawn | {id_: r for id_, r in each if id_.unique_id in holders}

    async def _query(self, replica: RunningReplica, like: RequestMetadata) -> None:
        id_, name = replica.replica_id, replica.replica_id.unique_id
        # Orders sent before this query arrive before it, so the report includes them.
        included, now = self._table.sent(id_), time.monotonic()
        try:
            report = await self._send(replica, like)
        except Exception as error:
            log.debug("%s does not answer: %s", name, type(error).__name__)
            if id_ in self.curr_replicas:
                # Whatever the cause, an order would fail there too.
                self._liveness.note_lost(name)
            else:
                # A leaving replica has ended, or answers no more queries.
                self._known.pop(id_, None)
        else:
            self._table.report(id_, now, report, included)
            self._liveness.note_answer(name)

    async def _send(self, replica: RunningReplica, like: RequestMetadata) -> Mapping[str, float]:
        id_ = f"{replica.replica_id.unique_id}-{time.monotonic_ns()}"
        metadata = replace(
            like,
            request_id=id_,
            internal_request_id=id_,
            call_method=STATS_METHOD,
            is_streaming=False,
            _request_protocol=RequestProtocol.UNDEFINED,
            tracing_context=None,
        )
        question = PendingRequest(args=[], kwargs={}, metadata=metadata, resolved=True)
        report: Mapping[str, float]
        report = await replica.try_send_request(question, with_rejection=False).get_async()
        return report


CONTROLLER_PERIOD_S = 10.0
"""Ray's controller also queries replicas and sends reports to every router. They matter only until
the router's first own query, half a second later."""
_SETTINGS: dict[str, Any] = {
    "request_router_class": f"{__name__}:{EarliestFinishRouter.__name__}",
    "request_routing_stats_period_s": CONTROLLER_PERIOD_S,
}
ROUTING = RequestRouterConfig(**_SETTINGS)
