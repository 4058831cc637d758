"""A scene is drawn as its caption says, and always in the same way."""

from __future__ import annotations

import numpy as np
import pytest

from sdxl.mini.scenes import (
    COLOURS,
    SHAPES,
    SIDE,
    Scene,
    Thing,
    caption,
    draw,
    sample_scene,
)


def scenes_of(count: int, held_out: bool = False) -> list[Scene]:
    rng = np.random.default_rng(7)
    return [sample_scene(rng, held_out) for _ in range(count)]


def test_the_same_seed_draws_the_same_picture() -> None:
    for scene in scenes_of(20):
        first, second = draw(scene, 5), draw(scene, 5)
        assert first.shape == (SIDE, SIDE, 3) and first.dtype == np.uint8
        assert np.array_equal(first, second), caption(scene)


def test_another_seed_draws_another_picture() -> None:
    scene = scenes_of(1)[0]
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


def test_ink_never_takes_the_colour_of_the_background() -> None:
    for scene in scenes_of(300):
        assert scene.background is None or scene.background not in {
            thing.colour for thing in scene.things
        }, caption(scene)


def test_the_splits_are_disjoint_and_cover_every_shape_and_colour() -> None:
    train = {caption(scene) for scene in scenes_of(400)}
    held_out = scenes_of(400, held_out=True)
    assert not train & {caption(scene) for scene in held_out}
    assert all(scene.is_full for scene in held_out)
    things = [thing for scene in held_out for thing in scene.things]
    assert {thing.shape for thing in things} == set(SHAPES)
    assert {thing.colour for thing in things} == set(COLOURS)
