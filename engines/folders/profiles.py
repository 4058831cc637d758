"""TensorRT's optimisation profiles, the shapes that a plan is built for, derived from the specs.

At the model's own size, each power of two and the largest number of rows have an exact profile, for
which TensorRT chooses kernels. Each profile costs build time, so one profile covers all counts
between two of these. A wide profile covers everything else. The first profile that fits is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sdxl.conditioning import MAX_CHUNKS_PER_CALL
from sdxl.specs import (
    CHUNK,
    IMAGE_COUNTS,
    IMAGE_TOKENS,
    MOST_PAGES,
    PAGE_COUNTS,
    Architecture,
    ModelSpec,
    ShapeError,
    image_axes,
    level_axes,
)

MAX_CHUNKS_OF_TOKENS = 3
"""A prompt takes up to three encoder calls."""
SMALLEST_SIDE, LARGEST_SIDE = 0.5, 2
"""the wide profile's sides, relative to the model's own side"""
DECODE_BATCH = 1
"""Pictures are decoded one by one: a profile for four took 68.8 GB at SDXL's largest size."""

REQUESTED = {
    "pages": (1, 2, PAGE_COUNTS[-1]),
    "bank": (2, 33, MOST_PAGES),
    "hints": (1, 1, 4),
    "pictures": (1, 1, 1),
    "images": (IMAGE_COUNTS[0], 1, 4),
    "image_tokens": (IMAGE_TOKENS[0], 16, 64),
}
"""The smallest, the usual and the largest size of axes that depend on a request's files: a row's
pages of LoRAs; the bank's pages; hints of a union for a picture; decoded pictures; a row's image
prompts; tokens of an image prompt"""

Shape = tuple[int, ...]
Range = tuple[Shape, Shape, Shape]
"""the smallest, the usual and the largest shape"""


@dataclass(frozen=True)
class Profile:
    """The range of every input, by name."""

    ranges: Mapping[str, Range]

    def admits(self, shapes: Mapping[str, Shape]) -> bool:
        return all(
            len(shapes[name]) == len(low)
            and all(a <= size <= b for a, size, b in zip(low, shapes[name], high, strict=True))
            for name, (low, _, high) in self.ranges.items()
        )


def buckets(max_batch: int) -> tuple[int, ...]:
    """Return the numbers of rows of UNet calls, two for each image. There is one for every number
    of images, because padding five images to eight would take 60% longer."""
    return tuple(range(2, 2 * max_batch + 1, 2))


def _row_ranges(max_batch: int) -> list[tuple[int, int]]:
    """Return the ranges of rows, ends included, that each have a profile."""
    counts = buckets(max_batch)
    exact = [rows for rows in counts if rows.bit_count() == 1 or rows == counts[-1]]
    between = [(low + 2, high - 2) for low, high in pairwise(exact) if high - low > 2]
    return sorted([*((rows, rows) for rows in exact), *between])


def profiles(
    spec: ModelSpec, arch: Architecture, max_batch: int, *, has_exact: bool = True
) -> list[Profile]:
    smallest, usual, largest = _wide_axes(arch, max_batch)
    wide = _profile(spec, smallest, usual, largest)
    if not has_exact:
        return [wide]
    names = {dim for tensor in spec.inputs for dim in tensor.free_axes.values()}
    counts = _row_ranges(max_batch) if "rows" in names else [(usual["rows"],) * 2]
    rows = [(usual | {"rows": low}, usual | {"rows": high}) for low, high in counts]
    fewest, _, most = _axes(REQUESTED)
    return [*(_profile(spec, low | fewest, high, high | most) for low, high in rows), wide]


def latent_sides(spec: ModelSpec, built: Sequence[Profile]) -> tuple[int, int]:
    """Return the smallest and the largest side of the wide profile."""
    return _widest(spec, built, "latent_h")


def most_chunks(spec: ModelSpec, built: Sequence[Profile]) -> int:
    """Return the chunks of the longest prompt that the wide profile allows."""
    return _widest(spec, built, "tokens")[1] // CHUNK


def image_limits(spec: ModelSpec, built: Sequence[Profile]) -> dict[str, Any]:
    """Return the fields of `Engines` for the image prompts that the wide profile allows."""
    return {
        "most_images": _widest(spec, built, "images")[1],
        "most_image_tokens": _widest(spec, built, "image_tokens")[1],
    }


def choose(name: str, built: Sequence[Profile], shapes: Mapping[str, Shape]) -> int:
    """Return the index of the first profile that allows these shapes."""
    for index, profile in enumerate(built):
        if profile.admits(shapes):
            return index
    widest = built[-1].ranges
    wrong = {n: s for n, s in shapes.items() if not Profile({n: widest[n]}).admits(shapes)}
    input_, shape = next(iter(wrong.items()))
    low, _, high = widest[input_]
    raise ShapeError(
        f"{name}: input {input_!r} has shape {shape}, the engine was built for {low} to {high}; "
        "use a smaller request, or build an engine for it"
    )


def _widest(spec: ModelSpec, built: Sequence[Profile], dim: str) -> tuple[int, int]:
    tensor = next(t for t in spec.inputs if dim in t.dims)
    low, _, high = built[-1].ranges[tensor.name]
    axis = tensor.dims.index(dim)
    return low[axis], high[axis]


def _wide_axes(arch: Architecture, max_batch: int) -> list[dict[str, int]]:
    """Return the smallest, the usual and the largest sizes of all axes."""
    ranges = {
        "rows": (1, 2, buckets(max_batch)[-1]),
        "tokens": (CHUNK, CHUNK, CHUNK * MAX_CHUNKS_OF_TOKENS),
        "batch": (1, 1, DECODE_BATCH),
        "chunks": (1, 2, MAX_CHUNKS_PER_CALL),
    }
    own = arch.sample_size
    sides = int(own * SMALLEST_SIDE), own, own * LARGEST_SIDE
    return [
        {**level_axes(side, side), **image_axes(arch, side, side), **axes}
        for side, axes in zip(sides, _axes(ranges | REQUESTED), strict=True)
    ]


def _axes(ranges: Mapping[str, tuple[int, int, int]]) -> list[dict[str, int]]:
    return [{name: sizes[i] for name, sizes in ranges.items()} for i in range(3)]


def _profile(
    spec: ModelSpec, low: Mapping[str, int], usual: Mapping[str, int], high: Mapping[str, int]
) -> Profile:
    return Profile({t.name: (t.shape(low), t.shape(usual), t.shape(high)) for t in spec.all_inputs})
