"""The tensors of images in flight, and the static ones that UNet calls run on.

An image owns its tensors. All calls run on one set of static tensors, the stage: before a call the
rows of its images are copied there, after it the results are copied back. So the addresses of a
call depend only on its network, axes and bucket, and a backend records each such call once. Text
and caches stay on the stage while the same images run. It imports no policy and reads no clock.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from sdxl import schedulers
from sdxl.adapters import NO_ADAPTERS, Pages, lora_inputs
from sdxl.conditioning import Conditioning
from sdxl.engine import Engines, torch_dtype
from sdxl.flight import PLAIN, Variant
from sdxl.specs import CHUNK, ROWS, Axes, TensorSpec

SCALE, TIMESTEP = (schedulers.COLUMNS.index(name) for name in ("s", "timestep"))
MOST_LAYOUTS = 512
"""Axes and buckets whose views are kept."""
_numbers = itertools.count()


@dataclass(eq=False)
class ImageTensors:
    """One image's tensors on the device. Rows: the positive one, then the negative one if any."""

    latents: Tensor
    """[channels, h, w], float32; in a slot [channels, 1, slot], as all maps"""
    guidance: float
    masked: Tensor | None = None
    """[channels, h, w]: input of an inpainting UNet besides the latents"""
    slot: int | None = None
    """pixels of its slot; None outside slots"""
    pages: Pages = NO_ADAPTERS.unet
    """its LoRAs"""
    sides: tuple[int, int] = field(init=False)
    """height and width of its latents"""
    estimate: Tensor = field(init=False)
    """of the finished picture, like the latents"""
    text: list[Tensor] = field(default_factory=list)
    """outputs of `unet_prompt`, stacked by shape: [rows, tensors, ...]"""
    cache: list[Tensor] = field(default_factory=list)
    """[rows, memory of a map] of each cache, once they had to leave the stage"""
    staged: Layout | None = None
    """the call whose caches on the stage are this image's, until they leave it"""
    keeps_cache: bool = False
    """True if the next step reads the caches."""

    def __post_init__(self) -> None:
        height, width = self.latents.shape[1:]
        self.sides = height, width
        self.latents = self.in_slot(self.latents)
        self.masked = None if self.masked is None else self.in_slot(self.masked)
        self.estimate = torch.zeros_like(self.latents)

    def in_slot(self, given: Tensor) -> Tensor:
        """Return a map [channels, h, w] as it lies in the image's slot, followed by zeros."""
        if self.slot is None:
            return given
        pixels = given.flatten(1)
        return pad(pixels, (0, self.slot - pixels.shape[1]))[:, None]

    def picture(self, own: Tensor) -> Tensor:
        """Return a view [channels, h, w] of one of its maps."""
        if self.slot is None:
            return own
        height, width = self.sides
        return own[:, 0, : height * width].unflatten(1, self.sides)

    def release(self) -> None:
        """Free everything but the result."""
        self.text, self.cache, self.staged, self.keeps_cache = [], [], None, False


@dataclass(frozen=True)
class Member:
    """An image that takes part in a call."""

    image: ImageTensors
    is_guided: bool
    """True if it has a negative row in this call."""


@dataclass(frozen=True)
class Layout:
    """How a call lies on the stage: each member's positive row, then the negative rows, then copies
    of row 0 up to the bucket."""

    axes: Axes
    bucket: int
    members: tuple[Member, ...]
    variant: Variant = field(default=PLAIN, compare=False)

    @cached_property
    def rows_of_members(self) -> list[list[int]]:
        """The rows of each member, positive first."""
        free = itertools.count(len(self.members))
        return [[i, next(free)] if m.is_guided else [i] for i, m in enumerate(self.members)]

    @cached_property
    def member_of_row(self) -> list[int]:
        guided = [i for i, member in enumerate(self.members) if member.is_guided]
        used = [*range(len(self.members)), *guided]
        return used + [0] * (self.bucket - len(used))

    def rows(self, tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the tensor of each row of the stage; `tensors` are the members' rows."""
        found = {
            place: tensor
            for places, own in zip(self.rows_of_members, tensors, strict=True)
            for place, tensor in zip(places, own, strict=False)
        }
        return [found.get(place, found[0]) for place in range(self.bucket)]


class _Tables:
    """What the host tells the calls of one bucket."""

    def __init__(self, bucket: int, device: torch.device) -> None:
        self.numbers = torch.zeros(bucket, len(schedulers.COLUMNS) + 1, device=device)
        """each member's coefficients of this step, and its guidance"""
        self.member_of_row, self.negative_row = torch.zeros(
            2, bucket, dtype=torch.int64, device=device
        )
        """the negative row is the positive one if there is no other"""
        self.sides = torch.ones(bucket, 2, dtype=torch.int32, device=device)
        """each row's latent height and width"""
        self._loras: dict[int, dict[str, Tensor]] = {}
        self._content: object = None

    def fill(self, coefficients: Tensor, layout: Layout) -> None:
        guidance = torch.tensor([[member.image.guidance] for member in layout.members])
        _fill(self.numbers, torch.cat([coefficients, guidance], 1))
        content = (
            layout.variant,
            [
                (member.is_guided, member.image.sides, member.image.pages)
                for member in layout.members
            ],
        )
        if content != self._content:
            self._content = content
            sides = [layout.members[i].image.sides for i in layout.member_of_row]
            _fill(self.sides, torch.tensor(sides, dtype=torch.int32))
            _fill(self.member_of_row, torch.tensor(layout.member_of_row))
            _fill(self.negative_row, torch.tensor([rows[-1] for rows in layout.rows_of_members]))
            if count := layout.variant.pages:
                pages = [layout.members[i].image.pages for i in layout.member_of_row]
                for name, values in lora_inputs(pages, count).items():
                    _fill(self.loras(count)[name], values)

    def loras(self, count: int) -> dict[str, Tensor]:
        """Each row's pages and their scales, for calls with this many."""
        if count not in self._loras:
            device, bucket = self.sides.device, len(self.sides)
            given = lora_inputs([NO_ADAPTERS.unet] * bucket, count)
            self._loras[count] = {name: each.to(device) for name, each in given.items()}
        return self._loras[count]

    @cached_property
    def coefficients(self) -> tuple[Tensor, ...]:
        return schedulers.columns(self.numbers[:, :-1])

    @cached_property
    def guidance(self) -> Tensor:
        return self.numbers[:, -1].view(-1, 1, 1, 1)


@dataclass(frozen=True)
class _Views:
    """The stage's tensors as calls of one set of axes and one bucket see them."""

    by_name: dict[str, Tensor]
    text: list[Tensor]
    """[tensors, rows, ...]"""
    caches: list[Tensor]
    """[rows, memory of a map]: copies of whole rows need not know how a map lies in memory"""
    latents: Tensor
    """a line for each row, of which the members use the first"""
    estimate: Tensor
    noise: Tensor
    """fresh noise, for schedulers that use it"""


class Stage:
    """The static tensors of a device's UNet calls, shared by its loops.

    Memory holds the largest bucket at the model's own size, and is shared by all axes and buckets
    that fit; for larger ones there is memory of twice that size, and so on."""

    def __init__(self, engines: Engines) -> None:
        self.number = next(_numbers)
        """identifies the stage's addresses"""
        self._engines, self._lock = engines, threading.Lock()
        self._prompt = engines["unet_prompt"].spec
        self._stacks = _by_shape(self._prompt.outputs)
        text = {t.name for t in self._prompt.outputs}
        deep, shallow = engines["unet_deep"].spec, engines["unet_shallow"].spec
        self._caches = [t for t in deep.outputs if t.name != "noise"]
        self._maps = [t for t in deep.tensors if t.name not in text]
        self._texts_of = {
            spec.name: [i for i, own in enumerate(self._stacks) if set(own) & set(spec.inputs)]
            for spec in (deep, shallow)
        }
        side = engines.arch.sample_size
        self._standard = {"latent_h": side, "latent_w": side, "tokens": CHUNK}
        self._standard[ROWS] = engines.buckets[-1]
        self._memory: dict[tuple[Hashable, int], Tensor] = {}
        self._tables: dict[int, _Tables] = {}
        self._views: OrderedDict[tuple[Axes, int], _Views] = OrderedDict()
        self._texts_at: dict[int, Hashable] = {}
        """by address: the bucket and members of texts on the stage"""
        self._caches_at: dict[int, Layout] = {}
        """by address: the layout of caches on the stage"""

    # -- before an image's first step -------------------------------------------------------

    def begin(
        self,
        images: Sequence[tuple[ImageTensors, Conditioning, int]],
        bucket: int,
        variant: Variant = PLAIN,
    ) -> None:
        """Compute the text of images in one call of `unet_prompt`. Each comes with its conditioning
        and the number of its rows."""
        rows = [(given, 0) for _, given, _ in images]
        rows += [(given, 1) for _, given, count in images if count == 2]
        rows += rows[:1] * (bucket - len(rows))
        engine = self._engines.of("unet_prompt", variant.name)
        inputs = {
            t.name: torch.stack([getattr(given, t.name)[row] for given, row in rows])
            for t in self._prompt.inputs
        }
        if variant.pages:
            pages = lora_inputs([given.adapters.unet for given, _ in rows], variant.pages)
            inputs |= {name: each.to(self._engines.device) for name, each in pages.items()}
        sizes = {ROWS: bucket, "tokens": images[0][1].tokens}
        texts = [self._new_text(own, sizes) for own in self._stacks]
        engine(inputs, self._named(texts))
        negative = itertools.count(len(images))
        for index, (image, _, count) in enumerate(images):
            places = [index, next(negative)] if count == 2 else [index]
            image.text = [torch.stack([text[:, row] for row in places]) for text in texts]

    def _new_text(self, own: Sequence[TensorSpec], sizes: dict[str, int]) -> Tensor:
        dims, dtype = (len(own), *own[0].shape(sizes)), torch_dtype(own[0])
        return torch.empty(dims, dtype=dtype, device=self._engines.device)

    def _named(self, texts: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            spec.name: tensor
            for own, text in zip(self._stacks, texts, strict=True)
            for spec, tensor in zip(own, text, strict=True)
        }

    # -- a step -----------------------------------------------------------------------------

    def step(
        self,
        network: str,
        layout: Layout,
        coefficients: Tensor,
        noise: Sequence[Tensor | None],
    ) -> bool:
        """Run a call: one step of each member, by its line of coefficients, and with fresh noise
        where its scheduler uses it. Return whether it took its usual time."""
        with self._lock:
            views, tables = self._views_of(layout), self._tables_of(layout.bucket)
            self._load(network, layout, views)
            tables.fill(coefficients, layout)
            for member, line, fresh in zip(layout.members, views.noise, noise, strict=False):
                if fresh is not None:
                    _fill(line, member.image.in_slot(fresh))
            is_usual = self._run(network, layout, views, tables)
            images = [member.image for member in layout.members]
            for own, lines in (
                ([image.latents for image in images], views.latents),
                ([image.estimate for image in images], views.estimate),
            ):
                torch._foreach_copy_(own, list(lines[: len(own)]))
            return is_usual

    def _run(self, network: str, layout: Layout, views: _Views, tables: _Tables) -> bool:
        engine = self._engines.of(network, layout.variant.name)
        count = layout.variant.pages
        given = {**views.by_name, **tables.loras(count)} if count else views.by_name
        inputs = {t.name: given[t.name] for t in engine.spec.inputs}
        if layout.members[0].image.slot is not None:
            inputs["sides"] = tables.sides
        outputs = {t.name: views.by_name[t.name] for t in engine.spec.outputs}

        def work() -> None:
            with torch.inference_mode():
                _prepare(views, tables)
                engine(inputs, outputs)
                _advance(views, tables)

        key = self.number, network, layout.axes, layout.bucket, layout.variant
        return self._engines.run_recorded(network, key, work)

    def _load(self, network: str, layout: Layout, views: _Views) -> None:
        """Copy what the call reads to the stage, unless it is there."""
        images = [member.image for member in layout.members]
        count = len(images)
        torch.stack([image.latents for image in images], out=views.latents[:count])
        torch.stack([image.estimate for image in images], out=views.estimate[:count])
        for number in self._texts_of[network]:
            target, content = views.text[number], (layout.bucket, layout.members)
            if self._texts_at.get(target.data_ptr()) != content:
                texts = [image.text[number].unbind() for image in images]
                torch.stack(layout.rows(texts), 1, out=target)
                self._texts_at[target.data_ptr()] = content
        if self._engines.arch.masked_channels:
            masked = [[image.masked] * 2 for image in images if image.masked is not None]
            constant = views.by_name["sample"][:, self._engines.arch.latent_channels :]
            torch.stack(layout.rows(masked), out=constant)
        self._load_caches(layout, views, is_read=network == "unet_shallow")

    def _load_caches(self, layout: Layout, views: _Views, *, is_read: bool) -> None:
        address = views.caches[0].data_ptr()
        images = [member.image for member in layout.members]
        if self._caches_at.get(address) != layout:
            self._save_caches()
            if is_read:
                for number, target in enumerate(views.caches):
                    rows = layout.rows([image.cache[number].unbind() for image in images])
                    torch.stack(rows, out=target)
            self._caches_at[address] = layout
        if not is_read:
            # This call makes new ones.
            for image in images:
                image.cache, image.staged = [], layout

    def _save_caches(self) -> None:
        """Copy caches that are only on the stage to their images."""
        for layout in self._caches_at.values():
            views = self._views_of(layout)
            for member, rows in zip(layout.members, layout.rows_of_members, strict=True):
                image = member.image
                if image.keeps_cache and image.staged == layout:
                    image.cache = [torch.stack([t[row] for row in rows]) for t in views.caches]
                    image.staged = None

    # -- memory -----------------------------------------------------------------------------

    def _tables_of(self, bucket: int) -> _Tables:
        if bucket not in self._tables:
            self._tables[bucket] = _Tables(bucket, self._engines.device)
        return self._tables[bucket]

    def _views_of(self, layout: Layout) -> _Views:
        key = layout.axes, layout.bucket
        if key not in self._views:
            self._views[key] = self._new_views({ROWS: layout.bucket, **dict(layout.axes)})
            if len(self._views) > MOST_LAYOUTS:
                self._views.popitem(last=False)
        self._views.move_to_end(key)
        return self._views[key]

    def _new_views(self, sizes: dict[str, int]) -> _Views:
        texts = [self._place(own[0].name, own[0], sizes, len(own)) for own in self._stacks]
        maps = {spec.name: self._place(spec.name, spec, sizes) for spec in self._maps}
        latents = TensorSpec("latents", "float32", ("rows", *self._latent_dims))
        own = [self._place(name, latents, sizes) for name in ("latents", "estimate", "fresh noise")]
        caches = [self._flat(t.name, t, sizes).view(sizes[ROWS], -1) for t in self._caches]
        return _Views({**maps, **self._named(texts)}, texts, caches, *own)

    @property
    def _latent_dims(self) -> tuple[int | str, ...]:
        return self._engines.arch.latent_channels, "latent_h", "latent_w"

    def _place(
        self, name: str, spec: TensorSpec, sizes: dict[str, int], count: int | None = None
    ) -> Tensor:
        """Return a view of the memory of this name; `count` tensors are stacked."""
        dims = spec.shape(sizes)
        stacked = dims if count is None else (count, *dims)
        memory = self._flat(name, spec, sizes, count or 1)
        is_map = len(stacked) == 4 and name not in ("latents", "estimate", "fresh noise")
        if is_map and self._engines.memory_format is torch.channels_last:
            rows, channels, height, width = stacked
            return memory.view(rows, height, width, channels).permute(0, 3, 1, 2)
        return memory.view(stacked)

    def _flat(self, name: str, spec: TensorSpec, sizes: dict[str, int], count: int = 1) -> Tensor:
        """Return as much of the memory of this name as such tensors take."""
        size, wanted = (count * math.prod(spec.shape(each)) for each in (self._standard, sizes))
        while size < wanted:
            size *= 2
        if (name, size) not in self._memory:
            dtype, device = torch_dtype(spec), self._engines.device
            self._memory[name, size] = torch.empty(size, dtype=dtype, device=device)
        return self._memory[name, size][:wanted]


def _by_shape(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    groups: dict[Hashable, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.dims, spec.dtype), []).append(spec)
    return list(groups.values())


def _fill(target: Tensor, values: Tensor) -> None:
    """Fill the first lines without waiting for the device."""
    if target.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    target[: len(values)].copy_(values, non_blocking=True)


def _prepare(views: _Views, tables: _Tables) -> None:
    """Fill the UNet's inputs of this step: the scaled sample and each row's own timestep."""
    scaled, times = views.latents * tables.coefficients[SCALE], tables.coefficients[TIMESTEP]
    sample = views.by_name["sample"][:, : scaled.shape[1]]
    sample.copy_(scaled.index_select(0, tables.member_of_row))
    views.by_name["timestep"].copy_(times.flatten().index_select(0, tables.member_of_row))


def _advance(views: _Views, tables: _Tables) -> None:
    """Guide the noise prediction and take one scheduler step, in float32. Lines that no member uses
    are computed too, and read by nothing."""
    positive = views.by_name["noise"].float()
    negative = positive.index_select(0, tables.negative_row)
    latents, estimate = schedulers.step(
        views.latents,
        torch.lerp(negative, positive, tables.guidance),
        views.estimate,
        views.noise,
        tables.coefficients,
    )
    views.latents.copy_(latents)
    views.estimate.copy_(estimate)
