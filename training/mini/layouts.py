"""Scenes with exact places of things, and their maps for ControlNets. It knows no networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.ndimage import map_coordinates, zoom

from sdxl.canny import Pixels, canny
from sdxl.mini.scenes import (
    SIDE,
    Image,
    Scene,
    Stamp,
    draw_stamps,
    place_things,
    sample_scene,
    signed_distance,
)

EDGES, DEPTH = "edges", "depth"
LOW, HIGH = 100, 200  # Canny's thresholds
FARTHEST, NEAREST = 96, 255  # grey levels of things; the background is black
FREE = 1 / 3  # share of layouts with things of any size anywhere
FREE_RADII = (13.0, 38.0)  # pixels
BEND, BEND_KNOTS = 1.5, 5  # pixels; independently moved points on each side


@dataclass(frozen=True)
class SettledScene:
    """A scene and its things, from the farthest to the nearest; `levels` are their grey levels."""

    scene: Scene
    background: str
    stamps: tuple[Stamp, ...]
    levels: tuple[float, ...]

    def draw(self) -> Image:
        return draw_stamps(self.background, self.stamps)


def settle_layout(scene: Scene, seed: int) -> SettledScene:
    """Return the layout that `scenes.draw` draws."""
    background, stamps = place_things(scene, seed)
    levels = np.random.default_rng(seed).uniform(FARTHEST, NEAREST, len(stamps))
    return SettledScene(scene, background, stamps, tuple(sorted(levels.tolist())))


def sample_layout(rng: np.random.Generator) -> SettledScene:
    """Return a layout for training."""
    layout = settle_layout(sample_scene(rng), int(rng.integers(2**31)))
    return scatter(layout, rng) if rng.random() < FREE else layout


def scatter(layout: SettledScene, rng: np.random.Generator) -> SettledScene:
    """Give the things other sizes and places. They may overlap."""
    stamps = []
    for stamp in layout.stamps:
        radius = float(rng.uniform(*FREE_RADII))
        margin = 1.05 * radius + 2
        x, y = rng.uniform(margin, SIDE - margin, 2)
        stamps.append(replace(stamp, centre=(float(x), float(y)), radius=radius))
    return replace(layout, scene=without_layout(layout.scene), stamps=tuple(stamps))


def bend(image: Image, rng: np.random.Generator) -> Image:
    """Move parts of a picture by a pixel or two, like the errors of a sampler's early steps."""
    moves = rng.normal(0, BEND, (2, BEND_KNOTS, BEND_KNOTS))
    scale = SIDE / BEND_KNOTS
    places = np.indices((SIDE, SIDE)) + zoom(moves, (1, scale, scale), order=3)
    planes = [map_coordinates(plane, places, order=1, mode="nearest") for plane in image.T]
    return np.stack(planes).T


def without_layout(scene: Scene) -> Scene:
    """Return the scene without sizes, place and relation."""
    things = tuple(replace(thing, size="medium") for thing in scene.things)
    return replace(scene, things=things, place=None, relation=None)


def map_edges(layout: SettledScene) -> Pixels:
    """Return white edges on black, [height, width]."""
    return canny(layout.draw(), LOW, HIGH)


def map_depth(layout: SettledScene) -> Pixels:
    """Return things in flat grey on black, [height, width]. Nearer things are brighter."""
    grid = np.arange(SIDE, dtype=np.float32) + 0.5
    depth = np.zeros((SIDE, SIDE), dtype=np.float32)
    for stamp, level in zip(layout.stamps, layout.levels, strict=True):
        x, y = grid[None, :] - stamp.centre[0], grid[:, None] - stamp.centre[1]
        alpha = np.clip(0.5 - signed_distance(stamp.shape, x, y, stamp.radius), 0, 1)
        depth += alpha * (level - depth)
    return (depth + 0.5).astype(np.uint8)


MAPS: dict[str, Callable[[SettledScene], Pixels]] = {EDGES: map_edges, DEPTH: map_depth}
