"""Judges a picture by its pixels, without a network: colours, places, counts, shapes, specks.

Every pixel gets the nearest palette colour. The rim's most frequent colour is the background's. All
other pixels form connected blobs, whose colours and centres are compared with the scene. The shape
that the scene names is fitted to each blob. The rest of the background must be plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import binary_dilation, binary_erosion, label

from sdxl.mini.scenes import (
    COLOURS,
    RELATIONS,
    SIDE,
    Floats,
    Image,
    Scene,
    Stamp,
    draw_stamps,
    signed_distance,
)

MIN_AREA = 60  # pixels; the smallest drawn shape covers about 200
SPECK_AREA = 4  # pixels
SPECK_CONTRAST = 32  # of 255, in any channel
_EDGE = 4  # width in pixels of a thing's blended edge
_NAMES = tuple(COLOURS)
_PALETTE = np.array([COLOURS[name] for name in _NAMES], dtype=np.int32)
_MARGIN = 10  # pixels around a region that its ideal may cover
_COMPASS = ((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1))

Mask = NDArray[np.bool_]
Place = tuple[float, float, float]  # centre (x, y) and radius


@dataclass(frozen=True, eq=False)
class Blob:
    """A connected region of one colour, without the pixels at its edge."""

    colour: str
    mask: Mask = field(repr=False)

    @property
    def y(self) -> float:
        return self._middle(axis=0)

    @property
    def x(self) -> float:
        return self._middle(axis=1)

    def _middle(self, axis: int) -> float:
        places = np.nonzero(self.mask)[axis]
        return float(places.min() + places.max()) / 2


def name_pixels(image: Image) -> NDArray[np.intp]:
    """Return the index of each pixel's nearest palette colour."""
    distance = ((image[..., None, :].astype(np.int32) - _PALETTE) ** 2).sum(-1)
    return np.asarray(distance.argmin(-1))


def background_of(names: NDArray[np.intp]) -> str:
    rim = np.concatenate(
        [names[:4].ravel(), names[-4:].ravel(), names[:, :4].ravel(), names[:, -4:].ravel()]
    )
    return _NAMES[int(np.bincount(rim, minlength=len(_NAMES)).argmax())]


def mask_things(image: Image) -> Mask:
    """Return the mask of all pixels that are not background."""
    names = name_pixels(image)
    return np.asarray(names != _NAMES.index(background_of(names)))


def _regions(mask: Mask) -> list[Mask]:
    """Return the mask's regions, connected over the four direct neighbours."""
    labels, count = label(mask)
    return [labels == number for number in range(1, count + 1)]


def blobs(image: Image) -> tuple[str, list[Blob]]:
    """Return the background's colour and every solid blob on it."""
    names = name_pixels(image)
    background = background_of(names)
    things = []
    for index, colour in enumerate(_NAMES):
        if colour == background:
            continue
        # Blended edges have other colours' names, but are thin.
        for region in _regions(binary_erosion(names == index)):
            if region.sum() >= MIN_AREA:
                things.append(Blob(colour, region))
    return background, things


def _is_placed(blob: Blob, place: str) -> bool:
    dx, dy = blob.x - SIDE / 2, blob.y - SIDE / 2
    if place == "in the center":
        return max(abs(dx), abs(dy)) < 14
    along, across = (dx, dy) if place in ("on the left", "on the right") else (dy, dx)
    sign = -1 if place in ("on the left", "at the top") else 1
    return sign * along > 10 and abs(across) < 20


def _is_related(first: Blob, second: Blob, relation: str) -> bool:
    dx, dy = RELATIONS[relation]
    away = (first.x - second.x, first.y - second.y)
    return away[0] * dx + away[1] * dy > 24 and abs(away[0] * dy) + abs(away[1] * dx) < 24


def faults(image: Image, scene: Scene) -> list[str]:
    """Return the first error about the scene in the picture, "kind: details"; empty if there is
    none."""
    background, things = blobs(image)
    if scene.background not in (None, background):
        return [f"background: {background}, not {scene.background}"]
    inks = [thing.colour for thing in scene.things * scene.count]
    if len(things) != len(inks):
        return [f"count: {len(things)} things, not {len(inks)}"]
    if None not in inks and sorted(b.colour for b in things) != sorted(map(str, inks)):
        return [f"colours: {[b.colour for b in things]}, not {inks}"]
    if scene.place is not None and not _is_placed(things[0], scene.place):
        return [f"place: ({things[0].x:.0f}, {things[0].y:.0f}), not {scene.place}"]
    if scene.relation is not None and not _is_in_order(things, scene):
        return [f"relation: not {scene.relation}: {things}"]
    return []


def _is_in_order(things: list[Blob], scene: Scene) -> bool:
    inks = [thing.colour for thing in scene.things]
    return any(
        [a.colour, b.colour] == inks and _is_related(a, b, str(scene.relation))
        for a, b in permutations(things)
    )


def _dilated(mask: Mask, by: int) -> Mask:
    return np.asarray(binary_dilation(mask, np.ones((2 * by + 1, 2 * by + 1))))


def _plain_colour(image: Image, background: str) -> NDArray[np.floating]:
    return np.median(image[name_pixels(image) == _NAMES.index(background)], axis=0)


def specks(image: Image) -> int:
    """Count spots on the background, outside the things and their blended edges."""
    background, things = blobs(image)
    is_off = np.abs(image - _plain_colour(image, background)).max(-1) > SPECK_CONTRAST
    for blob in things:
        is_off &= ~_dilated(blob.mask, _EDGE + 1)
    return sum(int(region.sum() >= SPECK_AREA) for region in _regions(is_off))


def outlines_of(image: Image) -> list[tuple[str, Mask]]:
    """Return the colour and the region of each thing. A region ends where half of the colour at the
    blended edge is ink."""
    background, things = blobs(image)
    paper = _plain_colour(image, background)
    outlines = []
    for blob in things:
        ink = np.median(image[blob.mask], axis=0) - paper
        mask = (image - paper) @ ink > 0.5 * (ink @ ink)
        for other in things:
            if other is not blob:
                mask &= ~_dilated(other.mask, 2)
        mask |= blob.mask  # also where the two touch
        labels, _ = label(mask)
        outlines.append((blob.colour, labels == labels[blob.mask][0]))
    return outlines


def _area(shape: str) -> float:
    """Return the area of the shape of radius 1."""
    grid = np.linspace(-1.5, 1.5, 301, dtype=np.float32)
    return 9 * float((signed_distance(shape, grid[None], grid[:, None], 1.0) < 0).mean())


@dataclass(frozen=True)
class ShapeFit:
    """The ideal shape that fits a region best, and their IoU."""

    ideal: Stamp
    overlap: float


def fit_shape(colour: str, mask: Mask, shape: str) -> ShapeFit:
    """Return this shape with the place and size that fit the region best."""
    rows, columns = np.nonzero(mask)
    top, left = max(0, rows.min() - _MARGIN), max(0, columns.min() - _MARGIN)
    part = mask[top : rows.max() + _MARGIN, left : columns.max() + _MARGIN]
    y, x = (np.arange(n, dtype=np.float32) + 0.5 for n in part.shape)

    def ideal_at(at: Place) -> Floats:
        """Return the shape with a blended edge, which gives the search a slope."""
        distance = signed_distance(shape, x[None] - at[0], y[:, None] - at[1], at[2])
        return np.clip(0.5 - distance, 0, 1)

    def misfit(at: Place) -> float:
        return float(((ideal_at(at) - part) ** 2).sum())

    start = (
        columns.mean() + 0.5 - left,
        rows.mean() + 0.5 - top,
        (len(rows) / _area(shape)) ** 0.5,
    )
    best = _descend(misfit, start)
    ideal = ideal_at(best) > 0.5
    return ShapeFit(
        Stamp(shape, colour, (float(best[0] + left), float(best[1] + top)), float(best[2])),
        float((ideal & part).sum() / (ideal | part).sum()),
    )


def _descend(misfit: Callable[[Place], float], start: Place) -> Place:
    """Compass search: try a step in both directions of each axis; halve it if none is better."""
    best, least, step = start, misfit(start), 2.0
    while step > 0.05:
        moves = [
            (best[0] + dx * step, best[1] + dy * step, best[2] + dr * step)
            for dx, dy, dr in _COMPASS
        ]
        value, move = min((misfit(move), move) for move in moves)
        if value < least:
            best, least = move, value
        else:
            step /= 2
    return best


def fit_shapes(image: Image, scene: Scene) -> list[ShapeFit] | None:
    """Return the ideal shape of each of the scene's things; None if a thing is missing.

    Things of one colour may be in any order.
    """
    outlines = outlines_of(image)
    things = scene.things * scene.count
    fits = {
        (i, thing.shape): fit_shape(colour, mask, thing.shape)
        for i, (colour, mask) in enumerate(outlines)
        for thing in scene.things
        if thing.colour in (None, colour)
    }
    if len(outlines) != len(things):
        return None
    placed = [
        [fits.get((i, thing.shape)) for i, thing in zip(order, things, strict=True)]
        for order in permutations(range(len(outlines)))
    ]
    complete = [[fit for fit in order if fit] for order in placed if all(order)]
    return max(complete, key=lambda order: sum(fit.overlap for fit in order), default=None)


def shape_overlaps(image: Image, scene: Scene) -> list[float]:
    """Return the IoU of each thing with its ideal shape; zeros if a thing is missing."""
    fits = fit_shapes(image, scene)
    return [fit.overlap for fit in fits] if fits else [0.0] * len(scene.things * scene.count)


class Straightened(NamedTuple):
    picture: Image
    overlap: float
    """IoU of the worst shape with its ideal, before straightening"""


def straighten(image: Image, scene: Scene) -> Straightened | None:
    """Return the picture redrawn with ideal shapes; None if it does not show its scene."""
    fits = None if faults(image, scene) else fit_shapes(image, scene)
    if not fits:
        return None
    background = background_of(name_pixels(image))
    worst = min(fit.overlap for fit in fits)
    return Straightened(draw_stamps(background, [fit.ideal for fit in fits]), worst)
