"""The dynamic programme against every plan there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eval.tuning.course import ages
from eval.tuning.search import Way, best_within, search, unbeaten


def every_plan(terms: list[list[float]], deep: list[int], shallow: list[int]) -> list[Way]:
    """All plans that the terms allow, by counting them out."""
    found = []
    for is_deep in itertools.product([True, False], repeat=len(deep) - 1):
        deep_steps = (0, *(n for n, each in enumerate(is_deep, 1) if each))
        by_step = ages(deep_steps, len(deep))
        if any(age > len(row) for age, row in zip(by_step, terms, strict=True)):
            continue
        cost = sum(s if age else d for age, d, s in zip(by_step, deep, shallow, strict=True))
        error = sum(row[age - 1] for age, row in zip(by_step, terms, strict=True) if age)
        found.append(Way(cost, error, deep_steps))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_search_finds_what_trying_every_plan_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, oldest = 9, int(rng.integers(2, 9))
    terms = [rng.random(min(step, oldest)).tolist() for step in range(steps)]
    # Guidance ends somewhere: from there on a step costs about half.
    cheap = int(rng.integers(1, steps + 1))
    deep = [100 if n < cheap else 55 for n in range(steps)]
    shallow = [12 if n < cheap else 7 for n in range(steps)]
    expected = unbeaten(every_plan(terms, deep, shallow))
    found = search(terms, deep, shallow)
    assert [way.cost for way in found] == [way.cost for way in expected]
    assert [way.error for way in found] == pytest.approx([way.error for way in expected])
    every = {(way.cost, way.deep_steps) for way in every_plan(terms, deep, shallow)}
    assert {(way.cost, way.deep_steps) for way in found} <= every, "a way costs what its plan costs"


def test_the_best_within_a_budget_is_the_dearest_unbeaten_one() -> None:
    ways = [Way(10, 3.0, (0,)), Way(20, 1.0, (0, 1)), Way(30, 0.0, (0, 1, 2))]
    assert best_within(ways, 29) == ways[1]
    assert best_within(ways, 9) is None
