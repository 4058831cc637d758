"""Draws captioned scenes: the data set of the embedded model.

A `Scene` has exactly the properties that its caption states. The seed chooses the open ones
(`None`) when the scene is drawn. It knows no networks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 128
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 25, 30),
    "yellow": (255, 225, 20),
    "green": (20, 160, 55),
    "blue": (30, 65, 225),
    "white": (250, 250, 250),
    "black": (12, 12, 12),
    "purple": (140, 35, 185),
    "orange": (255, 135, 10),
}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
SIZES = ("small", "medium", "large")
PLACES: dict[str, tuple[int, int]] = {
    "on the left": (31, 64),
    "on the right": (97, 64),
    "at the top": (64, 31),
    "at the bottom": (64, 97),
    "in the center": (64, 64),
}
# Unit vector from the second thing to the first, y pointing down.
RELATIONS: dict[str, tuple[int, int]] = {
    "above": (0, -1),
    "below": (0, 1),
    "left of": (-1, 0),
    "right of": (1, 0),
}
COUNTS = {1: "a", 2: "two", 3: "three"}

Image = NDArray[np.uint8]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Style:
    """A drawing style, which captions do not mention."""

    line: float = 0.0
    """width in pixels of a black outline"""
    wall: float = 0.0
    """width in pixels of the edge of hollow things; 0: filled"""


PLAIN = Style()
STYLES = {"outlined": Style(line=8.0), "hollow": Style(wall=7.0)}


@dataclass(frozen=True)
class Thing:
    """One shape. Captions do not mention a medium size."""

    shape: str
    colour: str | None
    size: str = "medium"


@dataclass(frozen=True)
class Scene:
    """One thing (at a place), a group of 2 or 3 equal things, or two things and their relation."""

    things: tuple[Thing, ...]
    background: str | None
    count: int = 1
    place: str | None = None
    relation: str | None = None

    @property
    def kind(self) -> str:
        if len(self.things) == 2:
            return "pair"
        return "single" if self.count == 1 else "group"

    @property
    def is_full(self) -> bool:
        """True if every colour is stated, so that 19 other captions differ in one attribute."""
        return self.background is not None and all(thing.colour for thing in self.things)

    @property
    def is_held_out(self) -> bool:
        """True for one description in twenty, which is never trained on in any wording."""
        return hashlib.sha256(caption(self).encode()).digest()[0] % 20 == 0


def _article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def _noun(thing: Thing, count: int = 1, large: str = "large") -> str:
    size = {"small": "small", "medium": "", "large": large}[thing.size]
    plural = "" if count == 1 else "es" if thing.shape == "cross" else "s"
    words = " ".join(word for word in (size, thing.colour, thing.shape + plural) if word)
    return _article(words) if count == 1 else f"{COUNTS[count]} {words}"


def caption(scene: Scene, rng: np.random.Generator | None = None) -> str:
    """Describe the scene in the plain wording, or with `rng` in one of several."""
    large, to_the, bare = "large", "", False
    if rng is not None:
        large = "big" if rng.random() < 0.3 else "large"
        to_the = "to the " if rng.random() < 0.4 else ""
        bare = scene.kind == "single" and rng.random() < 0.08
    nouns = [_noun(thing, scene.count, large) for thing in scene.things]
    if scene.kind == "pair":
        link = scene.relation or "and"
        text = f" {to_the if link.endswith(' of') else ''}{link} ".join(nouns)
    else:
        text = " ".join(filter(None, (nouns[0], scene.place)))
    if scene.background is not None:
        text += f" on {_article(scene.background)} background"
    return text.split(" ", 1)[1] if bare else text


def pick(rng: np.random.Generator, options: tuple[str, ...] | list[str]) -> str:
    return options[int(rng.integers(len(options)))]


def other_colours(*taken: str | None) -> list[str]:
    return [colour for colour in COLOURS if colour not in taken]


def _sample_any(rng: np.random.Generator) -> Scene:
    background = pick(rng, list(COLOURS))
    first = Thing(pick(rng, SHAPES), pick(rng, other_colours(background)), pick(rng, SIZES))
    draw = rng.random()
    if draw < 0.38:
        place = pick(rng, list(PLACES)) if rng.random() < 0.55 else None
        return Scene((first,), background, place=place)
    if draw < 0.54:
        return Scene((first,), background, count=int(rng.integers(2, 4)))
    sizes = SIZES[:2] if first.size == "large" else SIZES
    second = Thing(pick(rng, SHAPES), pick(rng, other_colours(background)), pick(rng, sizes))
    if (first.shape, first.colour) == (second.shape, second.colour):
        return _sample_any(rng)
    relation = pick(rng, list(RELATIONS)) if rng.random() < 0.85 else None
    return Scene((first, second), background, relation=relation)


def _leave_open(scene: Scene, rng: np.random.Generator) -> Scene:
    """Remove the background or also the colour from some scenes, so that short prompts work."""
    if rng.random() >= 0.1:
        return scene
    scene = replace(scene, background=None)
    if scene.kind == "single" and rng.random() < 0.35:
        scene = replace(scene, things=(replace(scene.things[0], colour=None),))
    return scene


def sample_scene(rng: np.random.Generator, held_out: bool = False) -> Scene:
    """Return a random scene of the training or the held-out split; held-out ones are all full."""
    while True:
        scene = _sample_any(rng)
        if scene.is_held_out == held_out:
            return scene if held_out else _leave_open(scene, rng)


def _polygon(points: NDArray[np.float64], x: Floats, y: Floats) -> Floats:
    """Signed distance to a simple polygon, negative inside."""
    best = np.full(np.broadcast_shapes(x.shape, y.shape), np.inf, dtype=np.float32)
    inside = np.zeros(best.shape, dtype=bool)
    for (ax, ay), (bx, by) in zip(points, np.roll(points, -1, axis=0), strict=True):
        ex, ey = bx - ax, by - ay
        along = np.clip(((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey), 0, 1)
        best = np.minimum(best, (x - ax - along * ex) ** 2 + (y - ay - along * ey) ** 2)
        if ay != by:
            crosses = ((ay > y) != (by > y)) & (x < ex * (y - ay) / ey + ax)
            inside ^= crosses
    distance = np.sqrt(best)
    return np.where(inside, -distance, distance)


def _spikes(radii: list[float]) -> NDArray[np.float64]:
    """Return a polygon with corners at these distances from the centre, from the top on."""
    angles = np.arange(len(radii)) * 2 * np.pi / len(radii)
    return np.stack([np.sin(angles), -np.cos(angles)], axis=1) * np.array(radii)[:, None]


def _box(x: Floats, y: Floats, width: float, height: float) -> Floats:
    return np.maximum(np.abs(x) - width, np.abs(y) - height)


_STAR = _spikes([1.2, 0.5] * 5)
_TRIANGLE = _spikes([1.2] * 3) + np.array([0.0, 0.15])

_DISTANCE: dict[str, Callable[[Floats, Floats, float], Floats]] = {
    "circle": lambda x, y, r: np.hypot(x, y) - r,
    "square": lambda x, y, r: _box(x, y, 0.88 * r, 0.88 * r),
    "triangle": lambda x, y, r: _polygon(_TRIANGLE * r, x, y),
    "star": lambda x, y, r: _polygon(_STAR * r, x, y),
    "ring": lambda x, y, r: np.abs(np.hypot(x, y) - 0.8 * r) - 0.24 * r,
    "cross": lambda x, y, r: np.minimum(_box(x, y, r, 0.3 * r), _box(x, y, 0.3 * r, r)),
}


def signed_distance(shape: str, x: Floats, y: Floats, radius: float) -> Floats:
    """Return the distance of a point, relative to the centre, to the edge; negative inside."""
    return _DISTANCE[shape](x, y, radius)


def _blend(canvas: Floats, stamp: Stamp, style: Style) -> None:
    """Draw one anti-aliased shape."""
    centre, radius = np.array(stamp.centre, dtype=np.float32), stamp.radius
    reach = 1.25 * radius + 2 + style.line
    left, top = (max(0, int(c - reach)) for c in centre)
    right, bottom = (min(SIDE, int(c + reach) + 1) for c in centre)
    x = np.arange(left, right, dtype=np.float32)[None, :] + 0.5 - centre[0]
    y = np.arange(top, bottom, dtype=np.float32)[:, None] + 0.5 - centre[1]
    distance = signed_distance(stamp.shape, x, y, radius)[..., None]
    patch = canvas[top:bottom, left:right]
    inks = [
        (stamp.colour, np.maximum(distance, -distance - style.wall) if style.wall else distance)
    ]
    if style.line:
        inks.insert(0, ("black", distance - style.line))
    for ink, distance in inks:
        alpha = np.clip(0.5 - distance, 0, 1)
        patch += alpha * (np.array(COLOURS[ink], dtype=np.float32) - patch)


_RADII = {
    "single": {"small": (15, 17), "medium": (24, 28), "large": (36, 40)},
    "pair": {"small": (14, 16), "medium": (21, 24), "large": (29, 31)},
    "group": {"small": (13, 15), "medium": (19, 21), "large": (23, 25)},
}


def _jitter(rng: np.random.Generator, x: float, y: float) -> tuple[float, float]:
    return float(rng.uniform(-x, x)), float(rng.uniform(-y, y))


def _centres(scene: Scene, rng: np.random.Generator) -> list[tuple[float, float]]:
    middle = SIDE / 2
    if scene.kind == "single":
        if scene.place is None:
            return [(middle, middle)]
        return [PLACES[scene.place]]
    if scene.kind == "group":
        if scene.count == 2:
            return [(35, middle), (93, middle)]
        return [(middle, 36), (35, 91), (93, 91)]
    dx, dy = RELATIONS[scene.relation or pick(rng, list(RELATIONS))]
    return [(middle + side * 31 * dx, middle + side * 31 * dy) for side in (1, -1)]


@dataclass(frozen=True)
class Stamp:
    """One thing with its place and size in pixels."""

    shape: str
    colour: str
    centre: tuple[float, float]
    radius: float


def draw_stamps(background: str, stamps: Iterable[Stamp], style: Style = PLAIN) -> Image:
    canvas = np.full((SIDE, SIDE, 3), COLOURS[background], dtype=np.float32)
    for stamp in stamps:
        _blend(canvas, stamp, style)
    return (canvas + 0.5).astype(np.uint8)


def place_things(scene: Scene, seed: int) -> tuple[str, tuple[Stamp, ...]]:
    """Return the background's colour and the things to draw. The seed chooses open properties."""
    rng = np.random.default_rng(seed)
    inks = [thing.colour for thing in scene.things]
    background = scene.background or pick(rng, other_colours(*inks))
    open_colour = pick(rng, other_colours(background))
    is_free = scene.kind == "single" and scene.place is None
    shift = _jitter(rng, *((18, 18) if is_free else (4, 4)))
    things = scene.things * (scene.count if scene.kind == "group" else 1)
    stamps = []
    for thing, (cx, cy) in zip(things, _centres(scene, rng), strict=True):
        radius = float(rng.uniform(*_RADII[scene.kind][thing.size]))
        jx, jy = _jitter(rng, 2, 2)
        margin = 1.05 * radius + 2
        x, y = np.clip([cx + shift[0] + jx, cy + shift[1] + jy], margin, SIDE - margin)
        stamps.append(Stamp(thing.shape, thing.colour or open_colour, (float(x), float(y)), radius))
    return background, tuple(stamps)


def draw(scene: Scene, seed: int, style: Style = PLAIN) -> Image:
    """Draw the scene as a 128×128 RGB picture."""
    return draw_stamps(*place_things(scene, seed), style)


def words() -> list[str]:
    """Return every word of captions, in a fixed order."""
    text = [
        *COLOURS,
        *SHAPES,
        *(f"{s}{'es' if s == 'cross' else 's'}" for s in SHAPES),
        *SIZES,
        *PLACES,
        *RELATIONS,
        *COUNTS.values(),
        "an and big to the background",
    ]
    return list(dict.fromkeys(" ".join(text).split()))


def unknown_words(prompt: str) -> tuple[str, ...]:
    """Return the words that no caption has, so that the model does not know them."""
    known = set(words())
    typed = re.findall(r"[^\W\d_]+", prompt.lower())
    return tuple(dict.fromkeys(word for word in typed if word not in known))
