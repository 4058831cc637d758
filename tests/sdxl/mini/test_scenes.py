"""A scene is drawn as its caption says, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from sdxl.mini.judge import faults
from sdxl.mini.scenes import (
    COLOURS,
    DISTRACTORS,
    SHAPES,
    SIDE,
    Scene,
    Thing,
    caption,
    distractors,
    draw,
    neighbours,
    sample_scene,
)


def _scenes(count: int, held_out: bool = False) -> list[Scene]:
    rng = np.random.default_rng(7)
    return [sample_scene(rng, held_out) for _ in range(count)]


def test_the_same_seed_draws_the_same_picture() -> None:
    for scene in _scenes(20):
        first, second = draw(scene, 5), draw(scene, 5)
        assert first.shape == (SIDE, SIDE, 3) and first.dtype == np.uint8
        assert np.array_equal(first, second), caption(scene)


def test_another_seed_draws_another_picture() -> None:
    scene = _scenes(1)[0]
    assert not np.array_equal(draw(scene, 1), draw(scene, 2))


@pytest.mark.parametrize(
    ("scene", "text"),
    [
        (Scene((Thing("circle", "red"),), "blue"), "a red circle on a blue background"),
        (
            Scene(
                (Thing("star", "yellow", "small"), Thing("square", "green")),
                "white",
                relation="above",
            ),
            "a small yellow star above a green square on a white background",
        ),
        (
            Scene((Thing("cross", "orange"),), "black", count=2),
            "two orange crosses on a black background",
        ),
        (
            Scene((Thing("ring", "orange", "large"),), "orange", place="on the left"),
            "a large orange ring on the left on an orange background",
        ),
        (Scene((Thing("circle", None),), None), "a circle"),
    ],
)
def test_captions_read_as_written(scene: Scene, text: str) -> None:
    assert caption(scene) == text


@pytest.mark.slow
def test_the_pixel_judge_accepts_every_drawn_scene() -> None:
    for seed, scene in enumerate(_scenes(150)):
        assert faults(draw(scene, seed), scene) == [], caption(scene)


def test_the_pixel_judge_rejects_a_neighbour_in_colour_place_or_count() -> None:
    for seed, scene in enumerate(_scenes(40, held_out=True)):
        image = draw(scene, seed)
        inks = [thing.colour for thing in scene.things]
        if len(set(inks)) < len(inks):
            continue  # blind to shape, the judge cannot tell which of two equal colours is where
        for kind in {"colour", "place", "count"} & set(neighbours(scene)):
            other = neighbours(scene)[kind][0]
            assert faults(image, other), f"{caption(scene)} passed as {caption(other)}"


def _parts(scene: Scene) -> list[object]:
    """Return everything that a caption states, one entry each."""
    things = [part for t in scene.things for part in (t.shape, t.colour, t.size)]
    return [*things, scene.background, scene.count, scene.place, scene.relation]


def test_distractors_differ_in_exactly_one_attribute() -> None:
    rng = np.random.default_rng(3)
    for scene in _scenes(100, held_out=True):
        others = distractors(scene, rng)
        texts = {caption(other) for other in others}
        assert len(texts) == DISTRACTORS and caption(scene) not in texts
        for other in others:
            pairs = zip(_parts(scene), _parts(other), strict=True)
            changed = sum(a != b for a, b in pairs)
            assert changed == 1, f"{caption(scene)} / {caption(other)}: {changed} changes"


def test_ink_never_takes_the_colour_of_the_background() -> None:
    for scene in _scenes(300):
        assert scene.background is None or scene.background not in {
            thing.colour for thing in scene.things
        }, caption(scene)


def test_the_splits_are_disjoint_and_cover_every_shape_and_colour() -> None:
    train = {caption(scene) for scene in _scenes(400)}
    held_out = _scenes(400, held_out=True)
    assert not train & {caption(scene) for scene in held_out}
    assert all(scene.is_full for scene in held_out)
    things = [thing for scene in held_out for thing in scene.things]
    assert {thing.shape for thing in things} == set(SHAPES)
    assert {thing.colour for thing in things} == set(COLOURS)
