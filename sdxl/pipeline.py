"""Turns requests into pictures: encodes prompts, submits images to the in-flight loop, decodes.

It knows nothing of files or HTTP.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate

from sdxl import schedulers
from sdxl.abilities import check_able, check_schedules
from sdxl.adapters import NO_ADAPTERS, Adapters, NoRoom, Use
from sdxl.catalogue import AdapterFile, Catalogue
from sdxl.checkpoint import Checkpoint
from sdxl.conditioning import Conditioning, TokenRow, encode, tokenize_rows
from sdxl.control_inputs import ControlInput, control_inputs, maps_of
from sdxl.control_maps import Pictures
from sdxl.cost import Costs
from sdxl.deepcache import StepPlan, deep_count, plan_of
from sdxl.editing import SourceLatents
from sdxl.engine import Engines, to_host
from sdxl.flight import PLAIN, Variant
from sdxl.image_codec import ENCODER, ImageDecoder, ImageEncoder, checked
from sdxl.image_inputs import ImageInput, image_inputs
from sdxl.images import BrokenImage, Pixels, enlarged, forming, load_preview_map
from sdxl.inflight import Failed, InFlight, Request
from sdxl.params import DRAWN_SEEDS, LATENT, GenerationParams, InvalidParams, Sizes
from sdxl.policy import Limits
from sdxl.prompt import BODY, MAX_TOKENS, count_tokens, learned_ids
from sdxl.refiner import Refiner, check_refiner, refined_from
from sdxl.rows import Stage
from sdxl.source import SourceImage
from sdxl.specs import CHUNK, CONTROLLED, Axes

ENCODE_BATCH = 16
"""requests whose prompts are encoded in one call"""
Forming = Callable[[], Pixels | None]
"""returns a preview of an unfinished picture; None before its first step"""


@dataclass(frozen=True)
class WithPictures:
    """A request and its pictures."""

    params: GenerationParams
    source: SourceImage | None = None
    """source of an edit"""
    maps: Pictures = field(default_factory=dict)
    """pictures of ControlNets and image prompts"""


@dataclass
class Result:
    """One picture, or its error."""

    index: int
    params: GenerationParams
    image: Tensor | None = None
    """[3, height, width] in -1..1, float32, on the CPU"""
    latents: Tensor | None = None
    error: Exception | None = None
    timings: dict[str, float] = field(default_factory=dict)
    deep_steps: int = 0
    shallow_steps: int = 0
    source: SourceImage | None = None
    """the source that `image` must be pasted into"""
    files: dict[str, Any] = field(default_factory=dict)
    """digests of the files of LoRAs and other adapters, for the metadata"""

    def took(self, stage: str, seconds: float) -> None:
        self.timings[stage] = self.timings.get(stage, 0.0) + seconds


def _learned(files: Iterable[AdapterFile]) -> dict[str, tuple[int, ...]]:
    """Return the token ids of embeddings by the words that name them."""
    return learned_ids((file.name, file.vectors) for file in files if file.kind == "embedding")


def _by_shelf(uses: Sequence[Use]) -> tuple[list[Use], list[AdapterFile], list[AdapterFile]]:
    """Return the files for the bank, the ControlNets and the image adapters."""
    nets, images = ([f for f, *_ in uses if f.kind == kind] for kind in ("control", "image"))
    return [use for use in uses if use[0].kind not in ("control", "image")], nets, images


_Numbered = tuple[int, WithPictures]


@dataclass
class _Course:
    """A picture in progress, with its later legs."""

    result: Result
    request: WithPictures
    conditioning: Conditioning
    later: list[GenerationParams]
    began_s: float


@dataclass
class Pipeline:
    """One model on one device."""

    checkpoint: Checkpoint
    engines: Engines
    catalogue: Catalogue = field(default_factory=Catalogue)
    """the files that requests may name"""
    is_deterministic: bool = False
    """True: networks run at one shape, so that other pictures cannot change a picture's bytes"""
    clock: Callable[[], float] = time.perf_counter
    refiner: Refiner | None = None

    @property
    def origin(self) -> str:
        """The model's most exact name."""
        return self.checkpoint.origin or self.checkpoint.name

    @property
    def sizes(self) -> Sizes:
        """The sizes that both model and engines support."""
        sizes = self.checkpoint.sizes
        if self.engines.latent_sides is None:
            return sizes
        low, high = (side * self.engines.arch.vae_scale for side in self.engines.latent_sides)
        return replace(sizes, minimum=max(sizes.minimum, low), maximum=min(sizes.maximum, high))

    @property
    def most_tokens(self) -> int:
        """The most tokens of a prompt that the engines support."""
        return min(self.engines.most_chunks * BODY, MAX_TOKENS)

    def resolve(self, params: GenerationParams) -> GenerationParams:
        resolved = params.resolve(self.sizes, lambda: secrets.randbelow(DRAWN_SEEDS))
        if self.refiner is not None and resolved.refiner in self.refiner.names:
            resolved = replace(resolved, refiner=self.refiner.name)
        return resolved

    @property
    def can_edit(self) -> bool:
        """True if the engines have an image encoder; engines of old exports do not."""
        return ENCODER in self.engines.by_name

    @property
    def embeds_guidance(self) -> bool:
        return self.engines.arch.embeds_guidance

    def plan(self, leg: GenerationParams) -> StepPlan:
        switch_at = refined_from(leg, self.checkpoint.scheduler)
        return plan_of(leg, embeds_guidance=self.embeds_guidance, refined_from=switch_at)

    def check(self, params: GenerationParams) -> GenerationParams:
        """Return the resolved request, or raise InvalidParams if the model does not support it."""
        resolved = self.resolve(params)
        check_able(self.engines, resolved)
        check_schedules(resolved, self.checkpoint.scheduler)
        self.tokenize(resolved, [file for file, *_ in self.uses(resolved)])
        return resolved

    def uses(self, params: GenerationParams) -> list[Use]:
        """Look up a request's LoRAs, embeddings, ControlNets and image adapters. Raise
        InvalidParams for unknown names and types of maps, and for files that engines cannot use."""
        check_refiner(self.refiner, params)
        find = self.catalogue.find
        loras = [
            (find("lora", each.name), each.weight, each.in_text) for each in params.loras or ()
        ]
        texts = {"prompt": params.prompt, "negative_prompt": params.negative_prompt or ""}
        embeddings = [(file, 1.0, 1.0) for file in self.catalogue.embeddings_in(texts)]
        if embeddings and self.engines.adapters is None:
            needed = "must not name embeddings: these engines have no networks that take them"
            raise InvalidParams("prompt", embeddings[0][0].name, needed)
        if embeddings and params.refiner is not None:
            needed = "must not name embeddings with a refiner, which reads none"
            raise InvalidParams("prompt", embeddings[0][0].name, needed)
        controls = [(find("control", each.name), each) for each in params.controls or ()]
        for file, control in controls:
            if types := file.types:
                control.type_number(types)
        files = [file for file, _ in controls]
        files += [find("image", each.name) for each in params.image_prompts or ()]
        return loras + embeddings + [(file, 1.0, 1.0) for file in files]

    def adapters(self, uses: Sequence[Use]) -> Adapters:
        """Load a request's LoRAs, embeddings, ControlNets and image adapters. They stay loaded
        while the result exists."""
        in_bank, nets, images = _by_shelf(uses)
        leased = NO_ADAPTERS
        with self.engines.on_stream():
            if in_bank and self.engines.adapters is not None:
                leased = self.engines.adapters.lease(in_bank)
            if nets and self.engines.controls is not None:
                leased = replace(leased, nets=self.engines.controls.lease(nets))
            if images and self.engines.image_prompts is not None:
                leased = replace(leased, image_adapters=self.engines.image_prompts.lease(images))
            if nets or images:
                self._open_networks(leased.variant, bool(nets), bool(images))
        return leased

    def _open_networks(self, variant: Variant, is_controlled: bool, has_images: bool) -> None:
        """Open the networks that a request needs before the loop calls them. Steps outside the
        windows of image prompts use the networks without image prompts."""
        variant = variant._replace(is_controlled=is_controlled)
        for images in {False, has_images}:
            for network in CONTROLLED:
                self.engines.of(network, variant._replace(images=int(images)))

    def loading_s(self, uses: Sequence[Use]) -> float:
        """Predict the seconds to load these files."""
        (in_bank, nets, images), engines = _by_shelf(uses), self.engines
        delay_s = engines.adapters.delay_s(in_bank) if engines.adapters else 0.0
        delay_s += engines.controls.delay_s(nets) if engines.controls else 0.0
        return delay_s + (engines.image_prompts.delay_s(images) if engines.image_prompts else 0.0)

    def variant(self, uses: Sequence[Use]) -> Variant:
        """Predict the UNet's variant with these files, without image prompts."""
        in_bank, nets, _ = _by_shelf(uses)
        variant = self.engines.adapters.variant(in_bank) if self.engines.adapters else PLAIN
        return variant._replace(is_controlled=bool(nets))

    def tokenize(
        self, params: GenerationParams, files: Iterable[AdapterFile] = (), most: int = MAX_TOKENS
    ) -> list[TokenRow]:
        """Return a resolved request's rows; `files` include its embeddings. Raise InvalidParams for
        text that cannot be encoded or has more than `most` tokens."""
        return tokenize_rows(
            params,
            self.checkpoint.tokenizers,
            self.checkpoint.force_zeros,
            min(most, self.most_tokens),
            embeds_guidance=self.embeds_guidance,
            learned=_learned(files),
        )

    def count_tokens(self, prompt: str) -> int:
        """Return the larger of both tokenizers' numbers of tokens."""
        learned = _learned(self.catalogue.embeddings_in({"prompt": prompt}))
        return max(count_tokens(prompt, each, learned) for each in self.checkpoint.tokenizers)

    def axes(self, height: int, width: int, chunks: int = 1) -> Axes:
        """Return the axes of calls with images of this size and number of chunks."""
        scale = self.engines.arch.vae_scale
        return self.engines.axes(height // scale, width // scale, chunks * CHUNK)

    def limits(self) -> Limits:
        buckets = self.engines.buckets
        if self.is_deterministic:
            buckets = buckets[-1:]
        rides = self.engines.device.type == "cuda" and not self.is_deterministic
        return Limits(buckets=buckets, rows=buckets[-1], rides=rides)

    @cached_property
    def stage(self) -> Stage:
        return Stage(self.engines)

    def in_flight(self, costs: Costs | None = None) -> InFlight:
        """Return a new loop. A pipeline's loops share its stage and the recorded calls."""
        refiner = self.refiner.stage if self.refiner else None
        return InFlight(
            self.engines, self.clock, self.limits(), costs or Costs(), self.stage, refiner
        )

    def generate(self, requests: Iterable[GenerationParams | WithPictures]) -> list[Result]:
        """Return all pictures in order. Raise InvalidParams as `check` does."""
        return sorted(self.stream(requests), key=lambda r: r.index)

    def stream(
        self,
        requests: Iterable[GenerationParams | WithPictures],
        on_tick: Callable[[int], None] | None = None,
        on_forming: Callable[[Forming], None] | None = None,
    ) -> Iterator[Result]:
        """Yield each picture when it is finished. `requests` is read only as fast as pictures are
        rendered. `on_tick` receives the number of steps taken, over all pictures; `on_forming`
        receives a function that returns a preview."""
        loop = self.in_flight()
        waiting: Iterator[_Numbered] = enumerate(self._resolved(each) for each in requests)
        pending: dict[int, _Course] = {}
        read: list[_Numbered] = []
        while True:
            has_room = len(pending) < 2 * loop.limits.rows
            if has_room:
                read += itertools.islice(waiting, ENCODE_BATCH - len(read))
            taken = read[:] if has_room else []
            leased = self._leased([each.params for _, each in taken], is_idle=not pending)
            # The others wait for room for their LoRAs.
            del read[: len(leased)]
            courses, failed = self._submit(loop, taken[: len(leased)], leased)
            yield from self._pictures(failed)
            pending |= courses
            if not pending:
                if taken:
                    continue
                return
            before = loop.steps_taken
            events = loop.tick()
            if on_tick is not None:
                on_tick(loop.steps_taken - before)
            if on_forming is not None:
                on_forming(partial(self._forming, loop, pending))
            ended = []
            for event in events:
                course = pending.pop(event.id)
                result = course.result
                result.took("denoise_s", self.clock() - course.began_s)
                if isinstance(event, Failed):
                    result.error = event.cause
                elif course.later:
                    result.error = self._submit_later(loop, course, event.latents, pending)
                else:
                    result.latents = event.latents
                if result.error is not None or result.latents is not None:
                    ended.append(result)
            yield from self._pictures(ended)

    def encode(
        self,
        params: Sequence[GenerationParams],
        prompts: Sequence[list[TokenRow]] | None = None,
        adapters: Sequence[Adapters] = (),
    ) -> list[Conditioning]:
        """Encode resolved requests with their adapters; `prompts`: their rows, if known."""
        adapters = adapters or [NO_ADAPTERS] * len(params)
        rows = prompts or [
            self.tokenize(request, [file for file, _ in loaded.files])
            for request, loaded in zip(params, adapters, strict=True)
        ]
        fixed = 2 if self.is_deterministic else None
        with self.engines.on_stream():
            encoded = encode(params, rows, self.engines, adapters, fixed_chunks=fixed)
            if self.refiner is None:
                return encoded
            return self.refiner.added(encoded, params, fixed, embeds_guidance=self.embeds_guidance)

    @cached_property
    def image_encoder(self) -> ImageEncoder:
        return ImageEncoder(self.engines)

    def encode_image(self, params: GenerationParams, source: SourceImage) -> SourceLatents:
        """Encode the source of a resolved edit."""
        return self.image_encoder.latents(
            source, is_sampled=params.encoding == "sample", is_full=params.first_step == 0
        )

    def enlarged(self, leg: GenerationParams, latents: Tensor) -> SourceLatents:
        """Enlarge the first leg's latents bilinearly for the second, as stable-diffusion-webui's
        "Latent" does."""
        with self.engines.on_stream():
            whole = interpolate(latents.cpu()[None], self.latent_size(leg), mode="bilinear")
            return SourceLatents(whole[0])

    def conditioned(self, leg: GenerationParams, conditioning: Conditioning) -> Conditioning:
        """Return the first leg's conditioning for the size of the second leg."""
        assert leg.width and leg.height
        with self.engines.on_stream():
            return conditioning.sized(leg.height, leg.width)

    def latent_size(self, params: GenerationParams) -> tuple[int, int]:
        """Return a resolved request's latent height and width."""
        assert params.width and params.height
        scale = self.engines.arch.vae_scale
        return params.height // scale, params.width // scale

    def request(
        self,
        params: GenerationParams,
        conditioning: Conditioning,
        source: SourceLatents | None = None,
        controls: tuple[ControlInput, ...] = (),
    ) -> Request:
        """Return the loop's request for one leg of a resolved request."""
        assert params.width and params.height and params.seed is not None
        table = schedulers.table(params.scheduler, params.steps, self.checkpoint.scheduler)
        table, plan = table.begun(params.first_step), self.plan(params)
        height, width = self.latent_size(params)
        return Request(
            conditioning,
            table.renewed(plan.refined_from) if plan.refined_from else table,
            plan,
            params.guidance,
            params.seed,
            height,
            width,
            source=self.image_encoder.completed(source, height, width),
            controls=controls,
            variation=params.variation,
        )

    def controls(
        self, leg: GenerationParams, conditioning: Conditioning, request: WithPictures
    ) -> tuple[ControlInput, ...]:
        """Return the inputs of a leg's ControlNets. Raise InvalidParams for wrong maps."""
        if not leg.controls:
            return ()
        maps = maps_of(leg, request.maps, request.source)
        return control_inputs(leg.controls, conditioning.adapters.nets, maps)

    def prompted(self, conditioning: Conditioning, request: WithPictures) -> Conditioning:
        """Add the request's image prompts. Raise InvalidParams for wrong pictures."""
        prompts, adapters = request.params.image_prompts, conditioning.adapters.image_adapters
        if not prompts:
            return conditioning
        with self.engines.on_stream():
            images = image_inputs(prompts, adapters, request.maps)
        self._check_images(images)
        return replace(conditioning, images=images)

    def _check_images(self, images: Sequence[ImageInput]) -> None:
        """Raise InvalidParams for more image prompts than the engines were built for."""
        most, most_tokens = self.engines.most_images, self.engines.most_image_tokens
        if len(images) > most:
            needed = f"must have at most {most} adapters, modes and step ranges for these engines"
            raise InvalidParams("image_prompts", len(images), needed)
        if (tokens := max((each.window.tokens for each in images), default=0)) > most_tokens:
            needed = f"must have at most {most_tokens} tokens together for these engines"
            raise InvalidParams("image_prompts", tokens, needed)

    @cached_property
    def image_decoder(self) -> ImageDecoder:
        return ImageDecoder(self.engines)

    def pixels(self, latents: Tensor) -> Pixels:
        """Decode [channels, h, w] to 8 bits, [height, width, 3]."""
        return self.image_decoder.pixels(latents)

    @cached_property
    def preview_map(self) -> Tensor:
        return load_preview_map(self.checkpoint.folder, self.engines.arch.latent_channels)

    def _forming(self, loop: InFlight, pending: Mapping[int, _Course]) -> Pixels | None:
        """Return a preview of the first unfinished picture."""
        for id_, course in sorted(pending.items(), key=lambda each: each[1].result.index):
            latents = loop.preview(id_)
            if latents is not None:
                with self.engines.on_stream():
                    host = to_host(latents, self.engines)
                    self.engines.fence().wait()
                result = course.result
                size = result.params.result_size
                return forming(host, self.preview_map, size, result.source)
        return None

    def _resolved(self, request: GenerationParams | WithPictures) -> WithPictures:
        if isinstance(request, GenerationParams):
            request = WithPictures(request)
        if request.source is None:
            request.params.check_plain()
        return replace(request, params=self.resolve(request.params))

    def _submit(
        self,
        loop: InFlight,
        numbered: Sequence[_Numbered],
        leased: Sequence[Adapters | Exception],
    ) -> tuple[dict[int, _Course], list[Result]]:
        """Submit requests. Return the pictures in progress by id, and the failed results."""
        courses, failed, ready = {}, [], []
        for (index, request), adapters in zip(numbered, leased, strict=True):
            if isinstance(adapters, Exception):
                failed.append(Result(index, request.params, error=adapters))
            else:
                ready.append((index, request, adapters))
        start = self.clock()
        conditionings = self.encode(
            [request.params for _, request, _ in ready], adapters=[loaded for *_, loaded in ready]
        )
        encode_s = (self.clock() - start) / max(len(ready), 1)
        for (index, request, adapters), conditioning in zip(ready, conditionings, strict=True):
            start, params, source = self.clock(), request.params, request.source
            first, *later = params.legs
            try:
                conditioning = self.prompted(conditioning, request)
                controls = self.controls(first, conditioning, request)
            except InvalidParams as error:
                failed.append(Result(index, params, error=error))
                continue
            latents = self.encode_image(first, source) if source else None
            first_leg = self.request(first, conditioning, latents, controls)
            deep = sum(deep_count(self.plan(leg)) for leg in params.legs)
            files = adapters.facts
            result = Result(index, params, deep_steps=deep, source=source, files=files)
            result.shallow_steps = params.all_steps - deep
            result.took("encode_s", encode_s + self.clock() - start)
            course = _Course(result, request, conditioning, later, self.clock())
            courses[loop.submit(first_leg)] = course
        return courses, failed

    def _leased(
        self, requests: Sequence[GenerationParams], *, is_idle: bool
    ) -> list[Adapters | Exception]:
        """Load the adapters of the first requests, as many as there is room for."""
        leased: list[Adapters | Exception] = []
        for params in requests:
            try:
                leased.append(self.adapters(self.uses(params)))
            except InvalidParams as error:
                leased.append(error)
            except NoRoom as error:
                if leased or not is_idle:
                    break
                leased.append(error)
        return leased

    def _submit_later(
        self, loop: InFlight, course: _Course, latents: Tensor, pending: dict[int, _Course]
    ) -> Exception | None:
        """Submit a picture's next leg, or return the error."""
        start, leg = self.clock(), course.later.pop(0)
        try:
            if course.result.params.upscaler == LATENT:
                source = self.enlarged(leg, latents)
            else:
                source = self.encode_image(leg, enlarged(self.pixels(latents), leg))
            conditioning = self.conditioned(leg, course.conditioning)
            controls = self.controls(leg, conditioning, course.request)
            id_ = loop.submit(self.request(leg, conditioning, source, controls))
        except Exception as cause:
            return cause
        course.began_s = self.clock()
        course.result.took("upscale_s", course.began_s - start)
        pending[id_] = course
        return None

    def _pictures(self, ended: Iterable[Result]) -> Iterator[Result]:
        """Decode results, those of equal size together. An asynchronous device decodes a group
        while the last one is checked."""
        by_shape: dict[tuple[int, ...], list[Result]] = {}
        for result in ended:
            if result.latents is None:
                yield result
            else:
                by_shape.setdefault(tuple(result.latents.shape), []).append(result)
        launched: deque[Callable[[], list[Result]]] = deque()
        size = self.engines.decode_batch
        for results in by_shape.values():
            for first in range(0, len(results), size):
                launched.append(self._launch_decoding(results[first : first + size]))
                if len(launched) > self.engines.calls_ahead:
                    yield from launched.popleft()()
        for finish in launched:
            yield from finish()

    def _launch_decoding(self, results: list[Result]) -> Callable[[], list[Result]]:
        """Start to decode results of one size. Return a function that waits for their pictures."""
        began_s = self.clock()
        latents = [result.latents for result in results if result.latents is not None]
        try:
            images = self.image_decoder.launch(latents)
        except Exception as cause:
            return partial(_failed, results, cause)
        return partial(self._finish, results, images, began_s)

    def _finish(
        self, results: list[Result], images: Callable[[], Tensor], began_s: float
    ) -> list[Result]:
        try:
            decoded = images()
        except Exception as cause:
            return _failed(results, cause)
        took_s = (self.clock() - began_s) / len(results)
        for result, image in zip(results, decoded, strict=True):
            result.timings["decode_s"] = took_s
            try:
                result.image = checked(image)
            except BrokenImage as cause:
                result.error = cause
        return results


def _failed(results: list[Result], cause: Exception) -> list[Result]:
    for result in results:
        result.error = cause
    return results
