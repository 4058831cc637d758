"""The router asks replicas whether they work. A replica that does not answer gets no new orders."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from sdxl.fleet import ASKED
from serve.fleet.liveness import Liveness
from serve.fleet.router import EarliestFinishRouter, LoadTable
from tests.serve.test_router import Id

PERIOD_S = 0.05


class Asked:
    """Stands for Ray's replica."""

    def __init__(self, name: str) -> None:
        self.replica_id = Id(name)
        self.count, self.fails, self.routing_stats = 0, False, dict[str, float]()


class Router(EarliestFinishRouter):
    """The router without Ray's part."""

    def __init__(self, *replicas: Asked) -> None:
        self.running = {each.replica_id.unique_id: each for each in replicas}
        self._queries, self._known = {}, {}
        self._liveness, self._rng = Liveness(), np.random.default_rng(0)
        self._table = LoadTable(tuple(self.curr_replicas.values()))

    @property
    def curr_replicas(self) -> Any:
        return {each.replica_id: each for each in self.running.values()}

    async def _send(self, replica: Any, like: Any) -> Any:
        replica.count += 1
        if replica.fails:
            raise ConnectionError
        return {"ready_in_s": 1.0, "alone_s": 1.0, "each_s": 1.0}


async def passes(router: Router, count: int) -> None:
    asking = asyncio.create_task(router._query_periodically(None))  # type: ignore[arg-type]
    await asyncio.sleep(count * PERIOD_S * 1.2)
    assert not asking.done(), asking.exception()
    asking.cancel()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.fleet.router.ASK_PERIOD_S", PERIOD_S)


@pytest.fixture
def router() -> Router:
    return Router(Asked("a"), Asked("b"))


async def test_a_leaving_replica_is_asked_until_it_has_finished(router: Router) -> None:
    router._liveness.note_holder("order", "a")
    await passes(router, 3)
    leaving = router.running.pop("a")
    before = leaving.count
    await passes(router, 5)
    assert leaving.count > before, "nobody asks it any more"
    assert router._liveness.count == 1
    router._liveness.forget("order")
    await passes(router, 1)
    before = leaving.count
    await passes(router, 5)
    assert leaving.count == before, "it has finished and is asked all the same"


async def test_a_replica_that_has_left_is_forgotten(router: Router) -> None:
    router._liveness.note_holder("order", "a")
    await passes(router, 3)
    leaving = router.running.pop("a")
    leaving.fails = True
    await passes(router, 5)
    assert router._liveness.unheard_s("a") == 0 and not router._liveness.is_silent("a")
    assert not any(id_.unique_id == "a" for id_ in router._known)


async def test_of_many_replicas_a_few_are_asked_and_those_that_have_orders() -> None:
    router = Router(*(Asked(str(i)) for i in range(20 * ASKED)))
    router._liveness.note_holder("order", "7")
    await passes(router, 1)
    each = list(router.running.values())
    assert router.running["7"].count > 0
    assert ASKED // 2 < sum(replica.count > 0 for replica in each) <= 4 * ASKED
    assert router._liveness.count == len(each)
    for _ in range(50):
        answered = [each[place] for place in router._table.answered]
        if len(answered) < len(each):
            break
        # On a stalled machine all answers are too old, so all replicas count.
        await passes(router, 1)
    assert 0 < len(answered) <= ASKED + 1 and all(replica.count for replica in answered)


async def test_a_deployment_without_replicas_is_asked_no_more(router: Router) -> None:
    """Its model may be unloaded. The next request starts the questions again."""
    router.running = {}
    async with asyncio.timeout(5):
        await router._query_periodically(None)  # type: ignore[arg-type]
