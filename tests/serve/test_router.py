"""The router's table: the replica that finishes first, by old reports and later orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sdxl.attachments import Lora
from sdxl.controls import Control
from sdxl.fleet import CHOICES
from sdxl.params import GenerationParams
from serve.fleet.router import LoadTable
from serve.orders import LORA_S, ImageOrder

IDLE = {"ready_in_s": 2.0, "alone_s": 2.0, "each_s": 0.5}
BUSY = {**IDLE, "ready_in_s": 8.0}
RNG = np.random.default_rng(0)


class Id(NamedTuple):
    unique_id: str


@dataclass(frozen=True, eq=False)
class Listed:
    """Stands for Ray's replica."""

    replica_id: Id
    routing_stats: dict[str, float]


def listed(*reports: dict[str, float]) -> Any:
    return [Listed(Id(f"r{i}"), report) for i, report in enumerate(reports)]


def table(*reports: dict[str, float]) -> LoadTable:
    """Replicas that reported at 100 s."""
    made = LoadTable(listed(*reports))
    for each, report in zip(made.replicas, reports, strict=True):
        made.report(each.replica_id, 100.0, report)
    return made


def ready(made: LoadTable, now: float) -> list[float]:
    return made.loads.ready(made.answered, now).tolist()


def test_an_idle_replica_stays_as_quick_as_it_reported_and_a_busy_one_works() -> None:
    made = table(IDLE, BUSY)
    assert [ready(made, now) for now in (100, 103, 200)] == [[2, 8], [2, 5], [2, 2]]


def test_only_orders_sent_after_the_report_are_added() -> None:
    made = table(IDLE)
    (replica,) = made.replicas
    for _ in range(4):
        made.note_sent(replica.replica_id)
    asked = made.sent(replica.replica_id)
    made.note_sent(replica.replica_id)
    made.report(replica.replica_id, 101, IDLE, asked)
    assert ready(made, 101) == [2 + 1 * 0.5]


def test_a_burst_goes_to_the_replicas_that_are_ready_first() -> None:
    made, sent = table(IDLE, {**IDLE, "ready_in_s": 4.0}), [0, 0]
    for _ in range(10):
        first = made.ranked(made.answered, 100, None, RNG)[0]
        made.note_sent(first.replica_id)
        sent[made.places[first.replica_id]] += 1
    assert sent == [7, 3]


def test_an_unknown_replica_is_tried_and_not_flooded() -> None:
    made = table(IDLE, {})
    first = made.ranked(made.answered, 100, None, RNG)
    assert first[0] is made.replicas[1]
    for _ in range(5):
        made.note_sent(first[0].replica_id)
    assert ready(made, 100) == [2, 5]


def test_reports_survive_a_change_of_the_replicas() -> None:
    before = table(IDLE, BUSY)
    before.note_sent(before.replicas[1].replica_id)
    after = LoadTable(before.replicas[1:], before)
    assert ready(after, 100) == [8.5]


def test_routers_with_the_same_old_reports_spread_their_orders() -> None:
    """If all routers choose the best replica, the fleet is slow."""
    reports = [{**IDLE, "ready_in_s": 2 + i / 100} for i in range(100)]
    made = table(*reports)
    firsts = {made.ranked(made.answered, 100, None, RNG)[0] for _ in range(50)}
    assert len(firsts) > 10
    assert len(made.ranked(made.answered, 100, None, RNG)) <= CHOICES


def test_orders_with_a_file_go_where_it_is_kept_unless_another_replica_is_sooner() -> None:
    order = ImageOrder(GenerationParams(loras=(Lora("ink"),)))
    file = order.kept_file
    assert file == ("ink", LORA_S)
    made = table(*[IDLE] * 100)
    firsts = {made.ranked(made.answered, 100, file, RNG)[0] for _ in range(50)}
    assert len(firsts) == 1, "its homes"
    for _ in range(10):
        for place in made.homes("ink"):
            made.note_sent(made.replicas[place].replica_id)
    assert made.ranked(made.answered, 100, file, RNG)[0] not in firsts
    made.loads.sent[:] = 0
    assert made.ranked(made.answered, 102, file, RNG)[0] not in firsts, "old reports"


def test_a_file_keeps_its_replicas_when_others_leave() -> None:
    made = table(*[IDLE] * 100)
    kept = {made.replicas[place].replica_id for place in made.homes("ink")}
    fewer = LoadTable(
        [each for i, each in enumerate(made.replicas) if i % 7 or each.replica_id in kept]
    )
    assert {fewer.replicas[place].replica_id for place in fewer.homes("ink")} == kept


def test_the_slowest_file_decides_about_the_place() -> None:
    params = GenerationParams(loras=(Lora("ink"),), controls=(Control("edges", "map.png"),))
    kept = ImageOrder(params).kept_file
    assert kept is not None and kept.name == "edges"
    assert ImageOrder(GenerationParams()).kept_file is None
