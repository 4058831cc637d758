"""The plans that no other beats in both cost and predicted error, by dynamic programming.

A plan's cost is the sum of its steps' costs; its error is the sum of what its shallow steps add,
each by its place and by the age of the features that it reads. So of two ways to the same step with
features of the same age, one that costs more and is no better is dropped. Numbers in, plans out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Terms = Sequence[Sequence[float]]
"""Of every step, what it adds to the error by the age of its features, from 1 on; it is shallow at
no other age."""


class Way(NamedTuple):
    """The first steps of a plan, or all of them."""

    cost: int
    """in whole units, so that the order of the steps rounds nothing"""
    error: float
    deep_steps: tuple[int, ...]


def search(terms: Terms, deep: Sequence[int], shallow: Sequence[int]) -> list[Way]:
    """All that nothing beats, the cheapest first. `deep` and `shallow` are the steps' costs."""
    ways = {0: [Way(deep[0], 0.0, (0,))]}
    for step in range(1, len(deep)):
        ways = _continued(ways, step, terms[step], deep[step], shallow[step])
    return unbeaten(way for each in ways.values() for way in each)


def _continued(
    ways: dict[int, list[Way]], step: int, terms: Sequence[float], deep: int, shallow: int
) -> dict[int, list[Way]]:
    """By the age of the features that the next step would find."""
    before = (way for each in ways.values() for way in each)
    found = {0: unbeaten(Way(w.cost + deep, w.error, (*w.deep_steps, step)) for w in before)}
    for age, term in enumerate(terms, 1):
        if reached := ways.get(age - 1):
            found[age] = [Way(w.cost + shallow, w.error + term, w.deep_steps) for w in reached]
    return found


def unbeaten(ways: Iterable[Way]) -> list[Way]:
    found: list[Way] = []
    for way in sorted(ways):
        if not found or way.error < found[-1].error:
            found.append(way)
    return found


def best_within(ways: Sequence[Way], cost: float) -> Way | None:
    """Of `unbeaten` ones, the best that costs no more."""
    return max((way for way in ways if way.cost <= cost), key=lambda way: way.cost, default=None)
