"""The stage: the static tensors that UNet calls run on.

Each image in flight has its own tensors. Before a call the rows of its images are copied to the
stage, and afterwards the results are copied back. So a call's addresses depend only on its network,
axes and bucket, and a backend records each such call once. Text and caches stay on the stage while
the same images run. This module imports no policy and reads no clock.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdxl import schedulers
from sdxl.adapters import lora_inputs
from sdxl.conditioning import Conditioning
from sdxl.control_calls import ControlCalls
from sdxl.engine import Engines, torch_dtype
from sdxl.flight import PLAIN, Variant
from sdxl.layout import ImageTensors, Layout, Tables, fill, scaled_sample
from sdxl.specs import (
    CONTROL,
    RESIDUAL,
    ROWS,
    Axes,
    ModelSpec,
    TensorSpec,
    image_specs,
    with_residuals,
)
from sdxl.static_memory import StaticMemory

MOST_LAYOUTS = 512
"""the pairs of axes and bucket whose views are kept"""
_numbers = itertools.count()


@dataclass(frozen=True)
class _Views:
    """The views of the stage's tensors for calls of one set of axes and one bucket."""

    by_name: dict[str, Tensor]
    text: list[Tensor]
    """[tensors, rows, ...]"""
    caches: list[Tensor]
    """[rows, memory of a map], so that rows are copied whole in any memory layout"""
    latents: Tensor
    """a line for each row; member i uses line i"""
    estimate: Tensor
    noise: Tensor
    """fresh noise"""


class Stage:
    """The static tensors of a device's UNet calls, shared by the device's loops."""

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
        controlled = with_residuals({"unet_deep": deep, "unet_shallow": shallow}, engines.arch)
        shallow_inputs = controlled[f"unet_shallow+{CONTROL}"].inputs
        self._kept = sum(t.name.startswith(RESIDUAL) for t in shallow_inputs)
        """the number of residuals that shallow steps add"""
        self._texts_of = {
            spec.name: [i for i, stack in enumerate(self._stacks) if set(stack) & set(spec.inputs)]
            for spec in (deep, shallow)
        }
        self._images = image_specs(engines.arch, deep.outputs[0].dtype)
        self._memory = StaticMemory(engines)
        self._control_calls = ControlCalls(engines, self._memory, self.number)
        self._tables: dict[int, Tables] = {}
        self._views: OrderedDict[tuple[Axes, int], _Views] = OrderedDict()
        self._caches_at: dict[int, Layout] = {}
        """the layout of the caches on the stage, by address"""

    # -- before an image's first step -------------------------------------------------------

    def begin(
        self,
        images: Sequence[tuple[ImageTensors, Conditioning, int]],
        bucket: int,
        variant: Variant = PLAIN,
    ) -> None:
        """Compute the text of images in one call of `unet_prompt`. Each image is given with its
        conditioning and the number of its rows."""
        rows = [(conditioning, 0) for _, conditioning, _ in images]
        rows += [(conditioning, 1) for _, conditioning, count in images if count == 2]
        rows += rows[:1] * (bucket - len(rows))
        engine = self._engines.of("unet_prompt", variant)
        inputs = {
            t.name: torch.stack([getattr(conditioning, t.name)[row] for conditioning, row in rows])
            for t in self._prompt.inputs
        }
        if variant.pages:
            pages = lora_inputs([each.adapters.unet for each, _ in rows], variant.pages)
            inputs |= {name: each.to(self._engines.device) for name, each in pages.items()}
        sizes = {ROWS: bucket, "tokens": images[0][1].tokens}
        texts = [self._new_text(stack, sizes) for stack in self._stacks]
        engine(inputs, _by_name(self._stacks, texts))
        negative = itertools.count(len(images))
        for index, (image, _, count) in enumerate(images):
            places = [index, next(negative)] if count == 2 else [index]
            image.text = [torch.stack([text[:, row] for row in places]) for text in texts]

    def _new_text(self, stack: Sequence[TensorSpec], sizes: dict[str, int]) -> Tensor:
        dims, dtype = (len(stack), *stack[0].shape(sizes)), torch_dtype(stack[0])
        return torch.empty(dims, dtype=dtype, device=self._engines.device)

    # -- a step -----------------------------------------------------------------------------

    def step(
        self,
        network: str,
        layout: Layout,
        coefficients: Tensor,
        noise: Sequence[Tensor | None],
    ) -> bool:
        """Run one step of each member in a call. `coefficients` has a line for each member; `noise`
        is None for a step without fresh noise. Return whether the call took its usual time."""
        with self._lock:
            views, tables = self._views_of(layout), self._tables_of(layout.bucket)
            self._load(network, layout, views)
            tables.fill(coefficients, layout)
            for member, line, fresh in zip(layout.members, views.noise, noise, strict=False):
                if fresh is not None:
                    fill(line, member.image.in_slot(fresh))
            is_usual = self._run(network, layout, views, tables)
            images = [member.image for member in layout.members]
            for targets, lines in (
                ([image.latents for image in images], views.latents),
                ([image.estimate for image in images], views.estimate),
            ):
                torch._foreach_copy_(targets, list(lines[: len(targets)]))
            return is_usual

    def _run(self, network: str, layout: Layout, views: _Views, tables: Tables) -> bool:
        engine = self._engines.of(network, layout.variant)
        count = layout.variant.pages
        tensors = {**views.by_name, **(tables.loras(count) if count else {})}
        if layout.variant.is_controlled:
            tensors |= self._load_residuals(network, layout, engine.spec)
        if layout.variant.images:
            tensors |= self._load_images(layout)
        inputs = {t.name: tensors[t.name] for t in engine.spec.inputs}
        if layout.members[0].image.slot is not None:
            inputs["sides"] = tables.sides
        outputs = {t.name: views.by_name[t.name] for t in engine.spec.outputs}

        def work() -> None:
            with torch.inference_mode():
                sample = views.by_name["sample"][:, : views.latents.shape[1]]
                scaled_sample(views.latents, tables, sample, views.by_name["timestep"])
                engine(inputs, outputs)
                _advance(views, tables)

        key = self.number, network, layout.axes, layout.bucket, layout.variant
        return self._engines.run_recorded(network, key, work)

    def control(self, layout: Layout, coefficients: Tensor, places: Sequence[int]) -> bool:
        """Run a ControlNet for the next deep step of each member. `places` are the indices of the
        net in the members' `controls`. Return whether the call took its usual time."""
        with self._lock:
            pairs = zip(layout.members, places, strict=True)
            states = [member.image.controls[place] for member, place in pairs]
            tables = self._tables_of(layout.bucket)
            return self._control_calls.run(layout, states, coefficients, tables)

    def _load_residuals(self, network: str, layout: Layout, spec: ModelSpec) -> dict[str, Tensor]:
        """Copy the residuals of ControlNets to the stage. After a deep step the images keep the
        residuals that shallow steps add."""
        sizes = self._memory.all_sizes({ROWS: layout.bucket, **dict(layout.axes)})
        specs = [t for t in spec.inputs if t.name.startswith(RESIDUAL)]
        is_deep, images = network == "unet_deep", [member.image for member in layout.members]
        loaded = {}
        for number, tensor in enumerate(specs):
            target = self._memory.map(tensor.name, tensor, sizes)
            nothing = target.new_zeros(()).expand(target.shape[1:])
            all_rows = []
            for image in images:
                added = image.residuals if is_deep else image.kept_residuals
                rows = added[number] if added else []
                all_rows.append([*rows, *[nothing] * (2 - len(rows))])
            torch.stack(layout.rows(all_rows), out=target)
            loaded[tensor.name] = target
        if is_deep:
            for image in images:
                image.kept_residuals = image.residuals[: self._kept]
                image.residuals = []
        return loaded

    def _load_images(self, layout: Layout) -> dict[str, Tensor]:
        """Copy the members' image prompts to the stage, unless they are there already. A row
        without image prompts has values of 0."""
        variant = layout.variant
        most = {"images": variant.images, "image_tokens": variant.image_tokens}
        sizes = {ROWS: layout.bucket, **dict(layout.axes), **most}
        *specs, mask = self._images
        stacks = _by_shape(specs)
        text = [self._memory.stack(stack[0], sizes, len(stack)) for stack in stacks]
        (masks,) = self._memory.stack(mask, sizes, 1)
        content = variant, layout.bucket, [(m, m.prompts) for m in layout.members]
        if self._memory.contents.get(masks.data_ptr()) != content:
            for target in (*text, masks):
                target.zero_()
            for member, rows in zip(layout.members, layout.rows_of_members, strict=True):
                for place, number in enumerate(member.prompts):
                    _put_image(text, masks, member.image.prompts[number], rows, place)
            self._memory.contents[masks.data_ptr()] = content
        return {**_by_name(stacks, text), mask.name: masks}

    def _load(self, network: str, layout: Layout, views: _Views) -> None:
        """Copy the call's inputs to the stage, unless they are there already."""
        images = [member.image for member in layout.members]
        count = len(images)
        torch.stack([image.latents for image in images], out=views.latents[:count])
        torch.stack([image.estimate for image in images], out=views.estimate[:count])
        for number in self._texts_of[network]:
            target, content = views.text[number], (layout.bucket, layout.members)
            if self._memory.contents.get(target.data_ptr()) != content:
                texts = [image.text[number].unbind() for image in images]
                torch.stack(layout.rows(texts), 1, out=target)
                self._memory.contents[target.data_ptr()] = content
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
            # This call computes new caches.
            for image in images:
                image.cache, image.staged = [], layout

    def _save_caches(self) -> None:
        """Copy the caches that are only on the stage to their images."""
        for layout in self._caches_at.values():
            views = self._views_of(layout)
            for member, rows in zip(layout.members, layout.rows_of_members, strict=True):
                image = member.image
                if image.keeps_cache and image.staged == layout:
                    image.cache = [torch.stack([t[row] for row in rows]) for t in views.caches]
                    image.staged = None

    # -- memory -----------------------------------------------------------------------------

    def _tables_of(self, bucket: int) -> Tables:
        if bucket not in self._tables:
            self._tables[bucket] = Tables(bucket, self._engines.device)
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
        memory = self._memory
        texts = [memory.stack(stack[0], sizes, len(stack)) for stack in self._stacks]
        maps = {spec.name: memory.map(spec.name, spec, sizes) for spec in self._maps}
        caches = [memory.flat(t.name, t, sizes).view(sizes[ROWS], -1) for t in self._caches]
        lines = [memory.lines(name, sizes) for name in ("latents", "estimate", "fresh noise")]
        return _Views({**maps, **_by_name(self._stacks, texts)}, texts, caches, *lines)


def _put_image(
    text: Sequence[Tensor], masks: Tensor, prompt: Sequence[Tensor], rows: Sequence[int], place: int
) -> None:
    """Copy an image prompt to its place in a member's rows."""
    for target, source in zip(text, prompt, strict=True):
        for number, row in enumerate(rows):
            target[:, row, place, : source.shape[2]] = source[:, number]
    for row in rows:
        masks[row, place, prompt[0].shape[2] :] = -math.inf


def _by_name(
    stacks: Sequence[Sequence[TensorSpec]], tensors: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of stacked tensors by name."""
    return {
        spec.name: tensor
        for stack, stacked in zip(stacks, tensors, strict=True)
        for spec, tensor in zip(stack, stacked, strict=True)
    }


def _by_shape(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    groups: dict[Hashable, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.dims, spec.dtype), []).append(spec)
    return list(groups.values())


def _advance(views: _Views, tables: Tables) -> None:
    """Guide the noise prediction and take one scheduler step, in float32, also in unused lines."""
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
