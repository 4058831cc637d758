"""Scenes that differ from a scene in one attribute: the hardest to distinguish."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sdxl.mini.scenes import (
    COUNTS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    caption,
    other_colours,
    pick,
    sample_scene,
)

DISTRACTORS = 19
HARD = ("star", "cross")


def is_hard(scene: Scene) -> bool:
    """Return whether a shape has a long outline for its area."""
    return any(thing.shape in HARD for thing in scene.things)


def _recolour(scene: Scene, index: int) -> Iterator[Scene]:
    thing = scene.things[index]
    for colour in other_colours(thing.colour, scene.background):
        yield _with_thing(scene, index, replace(thing, colour=colour))


def _reshape(scene: Scene, index: int) -> Iterator[Scene]:
    thing = scene.things[index]
    for shape in SHAPES:
        if shape != thing.shape:
            yield _with_thing(scene, index, replace(thing, shape=shape))


def _resize(scene: Scene, index: int) -> Iterator[Scene]:
    thing = scene.things[index]
    others = [other.size for i, other in enumerate(scene.things) if i != index]
    for size in SIZES:
        if size != thing.size and (size, *others) != ("large", "large"):
            yield _with_thing(scene, index, replace(thing, size=size))


def _with_thing(scene: Scene, index: int, thing: Thing) -> Scene:
    things = list(scene.things)
    things[index] = thing
    return replace(scene, things=tuple(things))


def neighbours(scene: Scene) -> dict[str, list[Scene]]:
    """Return every scene that differs in one stated attribute, by the attribute's name."""
    indices = range(len(scene.things))
    inks = [thing.colour for thing in scene.things]
    colour = [s for i in indices if scene.things[i].colour for s in _recolour(scene, i)]
    if scene.background is not None:
        free = other_colours(scene.background, *inks)
        colour += [replace(scene, background=background) for background in free]
    by_kind = {"colour": colour, "shape": [s for i in indices for s in _reshape(scene, i)]}
    if scene.place is not None:
        by_kind["place"] = [replace(scene, place=p) for p in PLACES if p != scene.place]
    if scene.relation is not None:
        by_kind["place"] = [replace(scene, relation=r) for r in RELATIONS if r != scene.relation]
    if scene.kind != "pair" and scene.place is None:
        by_kind["count"] = [replace(scene, count=n) for n in COUNTS if n != scene.count]
    by_kind["size"] = [s for i in indices for s in _resize(scene, i)]
    return {kind: [s for s in scenes if not _has_twins(s)] for kind, scenes in by_kind.items()}


def _has_twins(scene: Scene) -> bool:
    """Return whether two things are equal: they are a group of two, which has another caption."""
    looks = {(thing.shape, thing.colour) for thing in scene.things}
    return len(looks) < len(scene.things)


def distractors(scene: Scene, rng: np.random.Generator) -> list[Scene]:
    """Return 19 scenes that differ in one attribute other than size, evenly from all kinds."""
    pools = {kind: scenes for kind, scenes in neighbours(scene).items() if kind != "size"}
    for kind, pool in pools.items():
        pools[kind] = [pool[i] for i in rng.permutation(len(pool))]
    chosen: list[Scene] = []
    while len(chosen) < DISTRACTORS and any(pools.values()):
        chosen += [pool.pop() for pool in pools.values() if pool]
    if len(chosen) < DISTRACTORS:
        raise ValueError(f"{caption(scene)!r} has {len(chosen)} distractors of {DISTRACTORS}")
    return chosen[:DISTRACTORS]


def sample_group(rng: np.random.Generator, size: int, place_share: float) -> list[Scene]:
    """Return a training scene and others that differ from it in one attribute, of any kind.

    If the scene states a place, `place_share` of the others differ in it. With a share of 1, the
    scene always states one.
    """
    while True:
        scene = sample_scene(rng)
        pools = {
            kind: [s for s in pool if not s.is_held_out] for kind, pool in neighbours(scene).items()
        }
        kinds = [kind for kind, pool in pools.items() if pool]
        if place_share == 1 and "place" not in kinds:
            continue
        group = [scene]
        for _ in range(size - 1):
            is_place = "place" in kinds and rng.random() < place_share
            pool = pools["place" if is_place else pick(rng, kinds)]
            group.append(pool[int(rng.integers(len(pool)))])
        if len(set(group)) == size:
            return group
