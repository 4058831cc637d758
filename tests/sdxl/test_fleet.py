"""The choice of a replica for an image, and the number of replicas needed."""

from __future__ import annotations

import numpy as np
import pytest

from sdxl.fleet import (
    ASKED,
    CHOICES,
    HOMES,
    SPILL_S,
    STALE_S,
    Loads,
    hashed,
    homes,
    replicas_to_ask,
)
from sdxl.fleet import replicas_needed as needed

RNG = np.random.default_rng(0)
HASHES = np.array([hashed(str(i)) for i in range(300)], np.uint64)
NONE = np.zeros((1, 0), int)


def loads(*ready_in_s: float) -> Loads:
    made = Loads(len(ready_in_s))
    made.report(np.arange(len(ready_in_s)), 0.0, [ready_in_s, 0.0, 1.0], 0.0)
    return made


def test_the_candidates_are_few_and_none_is_preferred() -> None:
    made, places = loads(*[1.0] * 100), np.arange(100)[None]
    drawn = [made.candidates(places, 0.0, NONE, 0.0, RNG)[0] for _ in range(200)]
    assert {each.shape for each in drawn} == {(1, CHOICES)}
    assert len(np.unique(drawn)) > 90
    few = [loads(1, 1).candidates(np.arange(2)[None], 0, NONE, 0, RNG)[0][0, 0] for _ in range(20)]
    assert set(few) == {0, 1}


def test_several_routers_decide_at_once_as_each_alone() -> None:
    made = loads(5, 1, 3, 2)
    places, ready_s = made.candidates(np.array([[0, 1], [2, 3]]), 0.0, NONE, 0.0, RNG)
    chosen = np.take_along_axis(places, ready_s.argmin(-1)[:, None], 1)[:, 0]
    assert chosen.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("first_s", "chosen"), [(0.0, 0), (SPILL_S / 2, 0), (2 * SPILL_S, 1), (9.0, 1)]
)
def test_the_first_home_that_is_ready_soon_gets_the_image(first_s: float, chosen: int) -> None:
    made, kept = loads(first_s, 0.1, 0.0, 0.0), np.array([[0, 1]])
    places, ready_s = made.candidates(np.array([[2, 3]]), 0.0, kept, 5.0, RNG)
    assert places[0, ready_s[0].argmin()] == chosen


def test_another_replica_loads_the_file_when_its_homes_are_busy_or_unknown() -> None:
    made, kept = loads(9.0, 9.0, 0.0, 0.0), np.array([[0, 1]])
    for now, loading_s, is_home in (
        (0.0, 5.0, False),
        (0.0, 10.0, True),
        (STALE_S + 1, 10.0, False),
    ):
        places, ready_s = made.candidates(np.array([[2, 3]]), now, kept, loading_s, RNG)
        assert (places[0, ready_s[0].argmin()] < 2) == is_home


def test_files_spread_evenly_and_move_only_with_their_replica() -> None:
    firsts = [homes(hashed(f"file {i}"), HASHES)[0] for i in range(3000)]
    assert np.bincount(firsts, minlength=300).max() < 30
    fewer = [homes(hashed(f"file {i}"), HASHES[:-1])[0] for i in range(3000)]
    assert sum(a != b for a, b in zip(firsts, fewer, strict=True)) == firsts.count(299)
    assert len(homes(1, HASHES)) == HOMES and len(homes(1, HASHES[:3])) == 3


def test_a_router_asks_no_more_of_a_larger_fleet() -> None:
    assert replicas_to_ask(5, 2, RNG).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert replicas_to_ask(10_000, 3, RNG).shape == (3, ASKED)


def test_work_and_queue_decide_about_the_number_of_replicas() -> None:
    assert needed([0.8] * 10, [0.0] * 10, 2.0) == pytest.approx(10)
    assert needed([0.0], [6.0], 2.0) == pytest.approx(3)
