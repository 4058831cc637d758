"""The pixel judge on shapes and specks: originals pass, deformed ones do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import ndimage

from sdxl.mini.scenes import SHAPES, SIDE, Image, Scene, Thing, caption, draw
from tests.sdxl.mini.test_scenes import scenes_of
from training.mini.judge import faults, shape_overlaps, specks, straighten
from training.mini.neighbours import DISTRACTORS, distractors, neighbours

GOOD = 0.95
SINGLES = [Scene((Thing(shape, "red"),), "white") for shape in SHAPES]


def _moved(image: Image, dx: Callable[..., object], dy: Callable[..., object]) -> Image:
    """Return the picture with each pixel (x, y, from the middle) taken from (x + dx, y + dy)."""
    y, x = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    source = [y + dy(x, y) + (SIDE - 1) / 2, x + dx(x, y) + (SIDE - 1) / 2]
    channels = [
        ndimage.map_coordinates(image[..., c].astype(float), source, order=1, mode="nearest")
        for c in range(3)
    ]
    return np.stack(channels, axis=-1).astype(np.uint8)


def test_every_drawn_thing_has_its_shape_and_no_drawn_background_a_speck() -> None:
    for seed, scene in enumerate(scenes_of(24)):
        image = draw(scene, seed)
        overlaps = shape_overlaps(image, scene)
        assert min(overlaps) > 0.97, f"{caption(scene)}: {overlaps}"
        assert specks(image) == 0, caption(scene)


@pytest.mark.parametrize("scene", SINGLES, ids=SHAPES)
def test_a_shape_is_no_other_shape(scene: Scene) -> None:
    image = draw(scene, 3)
    for shape in set(SHAPES) - {scene.things[0].shape}:
        other = Scene((Thing(shape, "red"),), "white")
        assert shape_overlaps(image, other)[0] < 0.9, f"{caption(scene)} passed as a {shape}"


@pytest.mark.parametrize("scene", SINGLES, ids=SHAPES)
def test_a_wobbly_edge_a_squash_and_a_turn_lower_the_overlap(scene: Scene) -> None:
    image = draw(scene, 3)
    deformed = {
        "wobbly": _moved(image, lambda _, y: 2.5 * np.sin(y / 4), lambda x, _: 2.5 * np.sin(x / 4)),
        "squashed": _moved(image, lambda x, _: 0.18 * x, lambda *_: 0.0),
    }
    if scene.things[0].shape not in ("circle", "ring"):
        deformed["turned"] = _moved(image, lambda _, y: 0.2 * y, lambda x, _: -0.2 * x)
    for how, picture in deformed.items():
        overlap = shape_overlaps(picture, scene)[0]
        assert overlap < GOOD, f"{how} {caption(scene)}: {overlap:.3f}, below {GOOD} expected"


def test_a_soft_edge_leaves_the_shape_as_it_is() -> None:
    """The shape depends on where an edge lies, not on how sharp it is."""
    for scene in SINGLES[:2]:
        soft = ndimage.gaussian_filter(draw(scene, 3), sigma=(1.2, 1.2, 0))
        assert shape_overlaps(soft, scene)[0] > 0.97, caption(scene)


def test_things_of_one_colour_may_stand_in_any_order() -> None:
    scene = Scene((Thing("star", "red"), Thing("circle", "red")), "white", relation="above")
    turned = Scene(scene.things[::-1], "white", relation="below")
    assert min(shape_overlaps(draw(scene, 1), turned)) > 0.97


def test_a_missing_thing_has_no_shape() -> None:
    scene = Scene((Thing("star", "red"),), "white", count=3)
    assert shape_overlaps(draw(SINGLES[0], 1), scene) == [0.0, 0.0, 0.0]


def test_an_unevenly_coloured_thing_is_judged_too() -> None:
    """Its dark part still counts as red, but is nearer to the background than to its middle."""
    image = np.full((SIDE, SIDE, 3), 12, dtype=np.uint8)
    image[40:90, 40:90] = (250, 25, 30)
    image[40:50, 40:90] = (124, 20, 20)
    overlaps = shape_overlaps(image, Scene((Thing("square", "red"),), "black"))
    assert 0.7 < overlaps[0] <= 1, overlaps


@pytest.mark.parametrize("scene", scenes_of(6), ids=caption)
def test_a_bent_picture_with_a_speck_is_straightened_to_about_its_original(scene: Scene) -> None:
    image = draw(scene, 3)
    bent = _moved(image, lambda _, y: 1.5 * np.sin(y / 4), lambda x, _: 1.5 * np.sin(x / 4))
    bent[2:5, 2:5] = (200, 240, 255)
    straight = straighten(bent, scene)
    assert straight is not None, caption(scene)
    picture = straight.picture
    assert specks(picture) == 0 and min(shape_overlaps(picture, scene)) > 0.97
    assert straight.overlap == min(shape_overlaps(bent, scene)), "as it was before"
    errors = [np.abs(each.astype(int) - image).mean() for each in (bent, picture)]
    assert errors[1] < 0.7 * errors[0], (
        f"{errors[1]:.2f} from the original, the bent one {errors[0]:.2f}"
    )


def test_a_picture_of_another_scene_is_not_straightened() -> None:
    assert straighten(draw(SINGLES[0], 3), Scene((Thing("circle", "blue"),), "white")) is None


@pytest.mark.parametrize("corner", [(2, 118), (122, 3), (64, 1)])
def test_a_spot_outside_the_things_is_a_speck(corner: tuple[int, int]) -> None:
    image = draw(SINGLES[0], 3)
    y, x = corner
    image[y : y + 3, x : x + 3] = (200, 240, 255)
    assert specks(image) == 1


def test_an_invisible_shade_is_no_speck() -> None:
    image = draw(SINGLES[0], 3).astype(int)
    grain = np.random.default_rng(0).integers(-8, 9, image.shape)
    assert specks((image + grain).clip(0, 255).astype(np.uint8)) == 0


@pytest.mark.slow
def test_the_pixel_judge_accepts_every_drawn_scene() -> None:
    for seed, scene in enumerate(scenes_of(150)):
        assert faults(draw(scene, seed), scene) == [], caption(scene)


def test_the_pixel_judge_rejects_a_neighbour_in_colour_place_or_count() -> None:
    for seed, scene in enumerate(scenes_of(40, held_out=True)):
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
    for scene in scenes_of(100, held_out=True):
        others = distractors(scene, rng)
        texts = {caption(other) for other in others}
        assert len(texts) == DISTRACTORS and caption(scene) not in texts
        for other in others:
            pairs = zip(_parts(scene), _parts(other), strict=True)
            changed = sum(a != b for a, b in pairs)
            assert changed == 1, f"{caption(scene)} / {caption(other)}: {changed} changes"
