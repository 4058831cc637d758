"""Judges a picture by its pixels alone, with no network: colours, places, counts, shapes, specks.

Every pixel takes the name of the nearest palette colour; the rim names the background; what is
left falls into connected blobs, whose colours and centres are held against the scene. To each
blob the shape that the scene names is fitted; what is left of the background must be plain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
_EDGE = 4  # pixels about a thing that may be neither its colour nor the background's
_NAMES = tuple(COLOURS)
_PALETTE = np.array([COLOURS[name] for name in _NAMES], dtype=np.int32)


_MARGIN = 10  # pixels about a region that its ideal may cover
_COMPASS = ((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1))

Mask = NDArray[np.bool_]
Place = tuple[float, float, float]  # centre (x, y) and radius


@dataclass(frozen=True, eq=False)
class Blob:
    """A connected region of one colour, a pixel in from its edge."""

    colour: str
    region: NDArray[np.intp] = field(repr=False)  # (y, x), a row a pixel

    @property
    def y(self) -> float:
        return self._middle[0]

    @property
    def x(self) -> float:
        return self._middle[1]

    @property
    def _middle(self) -> tuple[float, float]:
        y, x = (self.region.min(0) + self.region.max(0)) / 2
        return float(y), float(x)

    @property
    def mask(self) -> Mask:
        return _mask_of(self.region)


def _mask_of(region: NDArray[np.intp]) -> Mask:
    mask = np.zeros((SIDE, SIDE), dtype=bool)
    mask[tuple(region.T)] = True
    return mask


def name_pixels(image: Image) -> NDArray[np.intp]:
    """The index of the nearest palette colour, pixel by pixel."""
    distance = ((image[..., None, :].astype(np.int32) - _PALETTE) ** 2).sum(-1)
    return np.asarray(distance.argmin(-1))


def background_of(names: NDArray[np.intp]) -> str:
    rim = np.concatenate(
        [names[:4].ravel(), names[-4:].ravel(), names[:, :4].ravel(), names[:, -4:].ravel()]
    )
    return _NAMES[int(np.bincount(rim, minlength=len(_NAMES)).argmax())]


def mask_things(image: Image) -> Mask:
    """Return where a picture is not its background."""
    names = name_pixels(image)
    return np.asarray(names != _NAMES.index(background_of(names)))


def _flood(left: Mask, y: int, x: int) -> NDArray[np.intp]:
    """Takes the region about a pixel (4 neighbours) out of the mask; as (y, x), a row a pixel."""
    left[y, x] = False
    queue, region = deque([(y, x)]), []
    while queue:
        cy, cx = queue.popleft()
        region.append((cy, cx))
        for ny, nx in ((cy - 1, cx), (cy + 1, cx), (cy, cx - 1), (cy, cx + 1)):
            if 0 <= ny < left.shape[0] and 0 <= nx < left.shape[1] and left[ny, nx]:
                left[ny, nx] = False
                queue.append((ny, nx))
    return np.array(region)


def _regions(mask: Mask) -> list[NDArray[np.intp]]:
    left = mask.copy()
    return [_flood(left, int(y), int(x)) for y, x in np.argwhere(mask) if left[y, x]]


def _core(mask: Mask) -> Mask:
    """Shrink by one pixel: blended edges take other colours' names, but are thin."""
    padded = np.pad(mask, 1)
    return (
        padded[1:-1, 1:-1]
        & padded[:-2, 1:-1]
        & padded[2:, 1:-1]
        & padded[1:-1, :-2]
        & padded[1:-1, 2:]
    )


def blobs(image: Image) -> tuple[str, list[Blob]]:
    """The background's colour and every solid blob on it."""
    names = name_pixels(image)
    background = background_of(names)
    found = []
    for index, colour in enumerate(_NAMES):
        if colour == background:
            continue
        for region in _regions(_core(names == index)):
            if len(region) >= MIN_AREA:
                found.append(Blob(colour, region))
    return background, found


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
    """The first thing the picture gets wrong about its scene, "kind: details"; none if right."""
    background, found = blobs(image)
    if scene.background not in (None, background):
        return [f"background: {background}, not {scene.background}"]
    wanted = len(scene.things) if scene.kind == "pair" else scene.count
    if len(found) != wanted:
        return [f"count: {len(found)} things, not {wanted}"]
    inks = [thing.colour for thing in scene.things] * (1 if scene.kind == "pair" else scene.count)
    if None not in inks and sorted(b.colour for b in found) != sorted(map(str, inks)):
        return [f"colours: {[b.colour for b in found]}, not {inks}"]
    if scene.place is not None and not _is_placed(found[0], scene.place):
        return [f"place: ({found[0].x:.0f}, {found[0].y:.0f}), not {scene.place}"]
    if scene.relation is not None and not _is_in_order(found, scene):
        return [f"relation: not {scene.relation}: {found}"]
    return []


def _is_in_order(found: list[Blob], scene: Scene) -> bool:
    relation = str(scene.relation)
    inks = [thing.colour for thing in scene.things]
    orders = [
        (a, b)
        for a, b in ((found[0], found[1]), (found[1], found[0]))
        if [a.colour, b.colour] == inks
    ]
    return any(_is_related(a, b, relation) for a, b in orders)


def _dilated(mask: Mask, by: int) -> Mask:
    padded = np.pad(mask, by)
    for axis in (0, 1):
        padded = np.logical_or.reduce([np.roll(padded, k, axis) for k in range(-by, by + 1)])
    return padded[by:-by, by:-by]


def _plain_colour(image: Image, background: str) -> NDArray[np.floating]:
    return np.median(image[name_pixels(image) == _NAMES.index(background)], axis=0)


def specks(image: Image) -> int:
    """How many spots there are on the background, outside the things and their blended edges."""
    background, found = blobs(image)
    is_off = np.abs(image - _plain_colour(image, background)).max(-1) > SPECK_CONTRAST
    for blob in found:
        is_off &= ~_dilated(blob.mask, _EDGE + 1)
    return sum(len(region) >= SPECK_AREA for region in _regions(is_off))


def outlines_of(image: Image) -> list[tuple[str, Mask]]:
    """Colour and region of each thing, its blended edge cut where half of it is ink."""
    background, found = blobs(image)
    paper = _plain_colour(image, background)
    outlines = []
    for blob in found:
        ink = np.median(image[blob.mask], axis=0) - paper
        mask = (image - paper) @ ink > 0.5 * (ink @ ink)
        for other in found:
            if other is not blob:
                mask &= ~_dilated(other.mask, 2)
        mask |= blob.mask  # also where the two touch
        y, x = blob.region[0]
        outlines.append((blob.colour, _mask_of(_flood(mask, int(y), int(x)))))
    return outlines


def _area(shape: str) -> float:
    """Of the shape of radius 1."""
    grid = np.linspace(-1.5, 1.5, 301, dtype=np.float32)
    return 9 * float((signed_distance(shape, grid[None], grid[:, None], 1.0) < 0).mean())


@dataclass(frozen=True)
class ShapeFit:
    """The ideal that suits a region best, and their IoU."""

    ideal: Stamp
    overlap: float


def fit_shape(colour: str, mask: Mask, shape: str) -> ShapeFit:
    """The ideal of this shape, where and as large as suits the region best."""
    rows, columns = np.nonzero(mask)
    top, left = max(0, rows.min() - _MARGIN), max(0, columns.min() - _MARGIN)
    part = mask[top : rows.max() + _MARGIN, left : columns.max() + _MARGIN]
    y, x = (np.arange(n, dtype=np.float32) + 0.5 for n in part.shape)

    def ideal_at(at: Place) -> Floats:
        """Blended at its edge: so a part of a pixel counts, and the search has a slope."""
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
    """Search by the compass: a step along each axis in turn, halved when none helps."""
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
    """The ideal of each of the scene's things; none where things are not found.

    Things of one colour may stand in any order.
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
    """How well each thing has its shape (IoU with the ideal): zeros where things are not found."""
    fits = fit_shapes(image, scene)
    return [fit.overlap for fit in fits] if fits else [0.0] * len(scene.things * scene.count)


class Straightened(NamedTuple):
    picture: Image
    overlap: float
    """of its worst shape with the ideal, before"""


def straighten(image: Image, scene: Scene) -> Straightened | None:
    """The picture drawn anew, each thing as its best ideal; none where it is not of its scene."""
    fits = None if faults(image, scene) else fit_shapes(image, scene)
    if not fits:
        return None
    background = background_of(name_pixels(image))
    worst = min(fit.overlap for fit in fits)
    return Straightened(draw_stamps(background, [fit.ideal for fit in fits]), worst)
