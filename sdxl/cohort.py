"""Images that run together, and the tensors they share.

A cohort's rows lie in one set of buffers: the deep call writes its caches there and the shallow
call reads them, so nothing is copied while the same images run together. When images join or leave,
or guidance ends for one, a new cohort gathers its rows from the old ones. Buffers are reused, so
that addresses recur and a backend can capture graphs on them. It imports no policy and reads no
clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from sdxl import schedulers
from sdxl.conditioning import Conditioning
from sdxl.engine import Engines, allocate
from sdxl.specs import ROWS, Axes, ModelSpec

PROMPT = "unet_prompt"
Source = TypeVar("Source")
SCALE, TIMESTEP = (schedulers.COLUMNS.index(name) for name in ("s", "timestep"))


@dataclass(frozen=True)
class RowSlot:
    """The place of one image's state."""

    cohort: Cohort
    index: int

    @property
    def has_negative_row(self) -> bool:
        return self.cohort.guided[self.index]


@dataclass(frozen=True)
class NewImage:
    """An image before its first step, or one whose negative row is computed again."""

    conditioning: Conditioning
    guidance: float
    latents: Tensor
    """[channels, h, w]: at first pure noise"""
    estimate: Tensor | None = None
    """of the finished picture, if there is one"""
    is_guided: bool = True
    masked: Tensor | None = None
    """input of an inpainting UNet besides the latents"""

    @property
    def rows(self) -> range:
        """The rows of its conditioning that it needs."""
        return range(2 if self.is_guided else 1)


@dataclass
class Buffers:
    """Tensors for one set of axes and a bucket; `by_name` holds the engines' tensors by spec
    name."""

    key: tuple[Axes, int, bool]
    """axes, bucket, and whether caches are among the tensors"""
    by_name: dict[str, Tensor]
    latents: Tensor
    estimate: Tensor
    coefficients: Tensor
    """of this step, one row for each image"""
    noise: Tensor
    """fresh noise, for schedulers that use it"""
    guidance: Tensor
    image_of_row: Tensor
    negative_row: Tensor
    """index of each image's negative row; of its positive row if it has none"""

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """The identity of these buffers: a recording is valid only for them."""
        own = (t for t in vars(self).values() if isinstance(t, Tensor))
        return tuple(t.data_ptr() for t in (*self.by_name.values(), *own))

    @cached_property
    def bytes(self) -> int:
        own = [t for t in vars(self).values() if isinstance(t, Tensor)]
        return sum(t.nbytes for t in (*self.by_name.values(), *own))

    def fill(self, name: str, values: Tensor) -> None:
        """Fill the first rows of a tensor without waiting for the device."""
        target: Tensor = getattr(self, name)
        if target.is_cuda and not values.is_cuda:
            values = values.pin_memory()
        target[: len(values)].copy_(values, non_blocking=True)


@dataclass
class Cohort:
    """`guided[i]` says whether image i has a negative row. Rows: every image's positive one in
    order, then the negative ones, then copies of row 0 up to the bucket."""

    buffers: Buffers
    guided: tuple[bool, ...]
    members: int = 0
    rows: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.guided)
        negatives = [i for i, is_guided in enumerate(self.guided) if is_guided]
        used = [*range(count), *negatives]
        padding = [0] * (self.bucket - len(used))
        row_of = {image: count + n for n, image in enumerate(negatives)}
        self.rows = [(i, row_of[i]) if i in row_of else (i,) for i in range(count)]
        self.buffers.fill("image_of_row", torch.tensor(used + padding))
        self.buffers.fill("negative_row", torch.tensor([rows[-1] for rows in self.rows]))

    @property
    def bucket(self) -> int:
        return self.buffers.key[1]

    @cached_property
    def latents(self) -> Tensor:
        return self.buffers.latents[: len(self.guided)]

    @cached_property
    def estimate(self) -> Tensor:
        return self.buffers.estimate[: len(self.guided)]

    @cached_property
    def sample(self) -> tuple[Tensor, Tensor]:
        """The UNet's sample: the latents, and the constant part, which has channels only in an
        inpainting checkpoint."""
        channels = self.buffers.latents.shape[1]
        whole = self.buffers.by_name["sample"]
        return whole[:, :channels], whole[:, channels:]

    @cached_property
    def guidance(self) -> Tensor:
        return self.buffers.guidance[: len(self.guided)]

    @cached_property
    def coefficients(self) -> tuple[Tensor, ...]:
        return schedulers.columns(self.buffers.coefficients[: len(self.guided)])

    @cached_property
    def is_guided(self) -> bool:
        """Whether all images are guided; their negative rows then lie side by side."""
        return all(self.guided)

    def holds(
        self, places: Sequence[RowSlot | None], guided: tuple[bool, ...], bucket: int
    ) -> bool:
        """Return whether this cohort holds exactly these images and rows in this order, and can
        run."""
        return (
            self.buffers.key[1:] == (bucket, True)
            and self.guided == guided
            and len(places) == len(guided)
            and all(
                p is not None and p.cohort is self and p.index == i for i, p in enumerate(places)
            )
        )

    def prepare(self) -> None:
        """Fill the UNet's per-step inputs: the scaled sample and each row's own timestep."""
        scaled, times = self.latents * self.coefficients[SCALE], self.coefficients[TIMESTEP]
        named, image_of_row = self.buffers.by_name, self.buffers.image_of_row
        self.sample[0].copy_(scaled.index_select(0, image_of_row))
        named["timestep"].copy_(times.flatten().index_select(0, image_of_row))

    def show_masked(self, images: Sequence[Tensor | None]) -> None:
        """Fill the constant part of the UNet's input."""
        stays = self.sample[1]
        if stays.shape[1]:
            found = torch.stack([each for each in images if each is not None])
            stays.copy_(found.index_select(0, self.buffers.image_of_row))

    def inputs(self, spec: ModelSpec) -> dict[str, Tensor]:
        return {t.name: self.buffers.by_name[t.name] for t in spec.inputs}

    def outputs(self, spec: ModelSpec) -> dict[str, Tensor]:
        return {t.name: self.buffers.by_name[t.name] for t in spec.outputs}

    def advance(self, *, reads_estimate: bool, is_noisy: bool) -> None:
        """Guide the noise prediction and take one scheduler step, in float32."""
        count = len(self.guided)
        predicted = self.buffers.by_name["noise"].float()
        if self.is_guided:
            negative = predicted[count : 2 * count]
        else:
            negative = predicted.index_select(0, self.buffers.negative_row[:count])
        latents, estimate = schedulers.step(
            self.latents,
            torch.lerp(negative, predicted[:count], self.guidance),
            self.estimate if reads_estimate else None,
            self.buffers.noise[:count] if is_noisy else None,
            self.coefficients,
        )
        self.latents.copy_(latents)
        self.estimate.copy_(estimate)


class BufferPool:
    """Creates cohorts and keeps the buffers of dissolved ones for reuse. It keeps at most the bytes
    of two sets for every bucket at the largest shape so far; the least recently used go first."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._specs = {
            t.name: t
            for network in ("unet_deep", "unet_shallow")
            for t in engines[network].spec.tensors
        }
        self._prompt_names = [t.name for t in engines[PROMPT].spec.outputs]
        self._cache_names = [t.name for t in engines["unet_deep"].spec.outputs if t.name != "noise"]
        self._rows_kept = 2 * sum(engines.buckets)
        self._bytes_a_row = 0.0
        self._free: list[Buffers] = []

    def begin(self, axes: Axes, images: Sequence[NewImage], bucket: int, *, runs: bool) -> Cohort:
        """Create a cohort of images and run `unet_prompt` for them; `runs` as in `form`."""
        cohort = Cohort(
            self._buffers(axes, bucket, runs),
            tuple(len(image.rows) == 2 for image in images),
            members=len(images),
        )
        factors = torch.tensor([image.guidance for image in images])
        cohort.buffers.fill("guidance", factors.view(-1, 1, 1, 1))
        cohort.buffers.fill("latents", torch.stack([image.latents for image in images]))
        cohort.estimate.zero_()
        for index, image in enumerate(images):
            if image.estimate is not None:
                cohort.estimate[index].copy_(image.estimate)
        cohort.show_masked([image.masked for image in images])
        rows = _rows([(image.conditioning, image.rows) for image in images], bucket)
        prompt = self._engines[PROMPT]
        inputs = {
            t.name: torch.stack([getattr(each, t.name)[row] for each, row in rows])
            for t in prompt.spec.inputs
        }
        prompt(inputs, cohort.outputs(prompt.spec))
        return cohort

    def form(
        self,
        places: Sequence[RowSlot],
        guided: tuple[bool, ...],
        bucket: int,
        *,
        reads_cache: bool,
        runs: bool,
    ) -> Cohort:
        """Gather images into one cohort, with negative rows for the `guided` ones. `reads_cache`:
        the next step is shallow, so caches are copied. `runs`: the cohort needs room for caches.
        The caller releases the old places."""
        first = places[0].cohort.buffers
        cohort = Cohort(
            self._buffers(first.key[0], bucket, runs or reads_cache), guided, members=len(places)
        )
        torch.stack([p.cohort.guidance[p.index] for p in places], out=cohort.guidance)
        torch.stack([p.cohort.latents[p.index] for p in places], out=cohort.latents)
        torch.stack([p.cohort.estimate[p.index] for p in places], out=cohort.estimate)
        cohort.show_masked([p.cohort.sample[1][p.index] for p in places])
        own = [
            (p.cohort.buffers, p.cohort.rows[p.index][: 2 if is_guided else 1])
            for p, is_guided in zip(places, guided, strict=True)
        ]
        rows = _rows(own, bucket)
        for name in (*self._prompt_names, *(self._cache_names if reads_cache else ())):
            torch.stack([b.by_name[name][row] for b, row in rows], out=cohort.buffers.by_name[name])
        return cohort

    def leave(self, place: RowSlot) -> None:
        place.cohort.members -= 1
        if place.cohort.members == 0:
            self._keep(place.cohort.buffers)

    def _keep(self, unused: Buffers) -> None:
        self._bytes_a_row = max(self._bytes_a_row, unused.bytes / unused.key[1])
        self._free.append(unused)
        while sum(b.bytes for b in self._free) > self._rows_kept * self._bytes_a_row:
            del self._free[0]

    def _buffers(self, axes: Axes, bucket: int, with_cache: bool) -> Buffers:
        key = (axes, bucket, with_cache)
        for index, buffers in enumerate(self._free):
            if buffers.key == key:
                return self._free.pop(index)
        with suppress(torch.OutOfMemoryError):
            return self._allocated(key)
        # Those of other shapes that nobody uses hold what this one lacks.
        self._free.clear()
        return self._allocated(key)

    def _allocated(self, key: tuple[Axes, int, bool]) -> Buffers:
        axes, bucket, with_cache = key
        sizes = {ROWS: bucket, **dict(axes)}
        device, layout = self._engines.device, self._engines.memory_format
        named = {
            name: allocate(spec, sizes, device, layout)
            for name, spec in self._specs.items()
            if with_cache or name not in self._cache_names
        }
        # The UNet's input may have more channels.
        dims = (bucket, *named["noise"].shape[1:])
        latents, estimate, noise = (torch.empty(dims, device=device) for _ in range(3))
        coefficients = torch.empty(bucket, len(schedulers.COLUMNS), device=device)
        guidance = torch.empty(bucket, 1, 1, 1, device=device)
        rows = (torch.empty(bucket, dtype=torch.int64, device=device) for _ in range(2))
        return Buffers(key, named, latents, estimate, coefficients, noise, guidance, *rows)


def _rows(images: Sequence[tuple[Source, Sequence[int]]], bucket: int) -> list[tuple[Source, int]]:
    """Return every image's positive row, then the negative rows, then copies of the first up to the
    bucket."""
    rows = [(source, own[0]) for source, own in images]
    rows += [(source, own[1]) for source, own in images if len(own) == 2]
    return rows + rows[:1] * (bucket - len(rows))
