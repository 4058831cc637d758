"""Judges a picture by its pixels alone: colours, places and counts, with no network.

Every pixel takes the name of the nearest palette colour; the rim names the background; what is
left falls into connected blobs, whose colours and centres are held against the scene.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdxl.mini.scenes import COLOURS, RELATIONS, SIDE, Image, Scene

MIN_AREA = 60  # pixels; the smallest drawn shape covers about 200
_NAMES = tuple(COLOURS)
_PALETTE = np.array([COLOURS[name] for name in _NAMES], dtype=np.int32)


@dataclass(frozen=True)
class Blob:
    """A connected region of one colour."""

    colour: str
    area: int
    x: float
    y: float


def name_pixels(image: Image) -> NDArray[np.intp]:
    """The index of the nearest palette colour, pixel by pixel."""
    distance = ((image[..., None, :].astype(np.int32) - _PALETTE) ** 2).sum(-1)
    return np.asarray(distance.argmin(-1))


def background_of(names: NDArray[np.intp]) -> str:
    rim = np.concatenate(
        [names[:4].ravel(), names[-4:].ravel(), names[:, :4].ravel(), names[:, -4:].ravel()]
    )
    return _NAMES[int(np.bincount(rim, minlength=len(_NAMES)).argmax())]


def _regions(mask: NDArray[np.bool_]) -> list[NDArray[np.intp]]:
    """Connected regions (4 neighbours) as arrays of (y, x)."""
    left = mask.copy()
    found = []
    for y, x in np.argwhere(mask):
        if not left[y, x]:
            continue
        left[y, x] = False
        queue, region = deque([(int(y), int(x))]), []
        while queue:
            cy, cx = queue.popleft()
            region.append((cy, cx))
            for ny, nx in ((cy - 1, cx), (cy + 1, cx), (cy, cx - 1), (cy, cx + 1)):
                if 0 <= ny < mask.shape[0] and 0 <= nx < mask.shape[1] and left[ny, nx]:
                    left[ny, nx] = False
                    queue.append((ny, nx))
        found.append(np.array(region))
    return found


def _core(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
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
                box = (region.min(0) + region.max(0)) / 2
                found.append(Blob(colour, len(region), float(box[1]), float(box[0])))
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
