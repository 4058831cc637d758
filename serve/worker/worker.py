"""One device of the service: orders in, pictures out, many at a time.

One thread denoises; others beside it encode prompts, decode latents and write files. It knows no
Ray and no HTTP. Every error is a Problem.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from engines.choice import why_slower
from sdxl import images, warmup
from sdxl.abilities import check_able, check_schedules
from sdxl.admission import Refused
from sdxl.attachments import take_tags
from sdxl.controls import windows_of
from sdxl.cost import Costs
from sdxl.fleet import QUEUE_S, WORK, Outlook
from sdxl.flight import Flight, Leg, State
from sdxl.image_prompts import image_windows_of
from sdxl.mini.scenes import unknown_words
from sdxl.model_names import MINI_NAME
from sdxl.params import LATENT, GenerationParams, InvalidParams
from sdxl.pipeline import ENCODE_BATCH, Pipeline
from sdxl.policy import Group, Limits
from sdxl.prompt import whole_chunks, words_of
from sdxl.provenance import Provenance
from serve import errors, tracing
from serve.fleet.identity import labelled
from serve.orders import Done, ImageOrder, ModelCard, PromptFacts, Queued, Update
from serve.tracing import TimedPart
from serve.worker.denoiser import Denoiser
from serve.worker.job import ImageJob
from serve.worker.metrics import MeteredCosts, WorkerMetrics
from serve.worker.outcomes import as_problem
from serve.worker.picture_writer import UNMARKED, PictureWriter
from serve.worker.prompt_encoder import PromptEncoder
from serve.worker.safety import UNCHECKED, Safety
from serve.worker.stalls import STALL_S

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Threads:
    denoiser: Denoiser
    encoder: PromptEncoder
    writer: PictureWriter

    def expect(self, pipeline: Pipeline, costs: Costs) -> None:
        """Set the usual times of common calls from measurements. A batch of prompts takes at most
        as long as its prompts one by one."""
        side = pipeline.sizes.default // pipeline.engines.arch.vae_scale
        self.encoder.calls.expect(ENCODE_BATCH.bit_length(), ENCODE_BATCH * costs.encode_s)
        self.writer.calls.expect((side, side), costs.decode_s)

    def check(self) -> None:
        """Raises Unhealthy."""
        self.denoiser.check()
        self.encoder.calls.check()
        self.writer.calls.check()

    def close(self) -> None:
        self.encoder.close()
        self.denoiser.stop(timeout_s=5.0)
        self.writer.close()


class Worker:
    """Implements ImageBackend. `start` before the first order, `close` after the last."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        queue: int = 64,
        max_prompt_tokens: int = 225,
        stall_s: float = STALL_S,
        tracer: Tracer | None = None,
        provenance: Provenance = UNMARKED,
        safety: Safety = UNCHECKED,
    ) -> None:
        self.pipeline, self.queue = pipeline, queue
        self.max_prompt_tokens = min(whole_chunks(max_prompt_tokens), pipeline.most_tokens)
        self.stall_s, self.tracer = stall_s, tracer
        self.provenance, self.safety = provenance, safety
        self.why_slower = why_slower(pipeline.engines.description)
        self.meters = WorkerMetrics()
        self.meters.runs(pipeline.engines.description, is_slower=bool(self.why_slower))
        self._jobs: set[ImageJob] = set()
        self._is_closed = False
        self._arrived_s, self._demand_s = 0.0, pipeline.clock()
        """device seconds of all orders that arrived since `_demand_s`"""
        self._threads: _Threads | None = None

    def start(self) -> None:
        """Measure, then accept orders. Blocks until a first picture is made."""
        costs = MeteredCosts()
        loop = self.pipeline.in_flight(costs)
        denoiser = Denoiser(loop, self.stall_s)
        encoder = PromptEncoder(self.pipeline, denoiser, self.stall_s)
        writer = PictureWriter(self.pipeline, costs, self.stall_s, self.provenance, self.safety)
        threads = _Threads(denoiser, encoder, writer)
        denoiser.start()
        try:
            rooms = warmup.Rooms(encoder.call, denoiser.call, writer.call)
            warmup.measure(self.pipeline, rooms, costs)
        except BaseException:
            threads.close()
            raise
        loop.limits = limits = warmup.knee(self.pipeline, costs, self.queue)
        log.info(
            "%d rows in flight, %d while many wait; %d images may wait",
            limits.rows,
            limits.most_rows,
            limits.queue,
        )
        self.meters.starts(self.pipeline.engines)
        costs.on_call = self.meters.observe
        if self.tracer is not None:
            costs.on_call = partial(self._note_call, denoiser)
        threads.expect(self.pipeline, costs)
        self._threads = threads

    # -- ImageBackend -----------------------------------------------------------------------

    async def card(self) -> ModelCard:
        self._started()
        pipeline = self.pipeline
        loras, embeddings, nets, adapters = await asyncio.to_thread(pipeline.catalogue.names)
        return ModelCard(
            pipeline.checkpoint.name,
            pipeline.sizes,
            engines=dict(pipeline.engines.description),
            why_slower=self.why_slower,
            can_edit=pipeline.can_edit,
            # Twice the images of one call: while they are denoised, others are encoded or decoded.
            at_once=2 * pipeline.engines.buckets[-1] // pipeline.plan(GenerationParams()).room[0],
            presets=pipeline.checkpoint.presets,
            embeds_guidance=pipeline.embeds_guidance,
            loras=loras if pipeline.engines.adapters else (),
            embeddings=embeddings if pipeline.engines.adapters else {},
            controlnets=nets if pipeline.engines.controls else {},
            ip_adapters=adapters if pipeline.engines.image_prompts else {},
            refiner=pipeline.refiner.name if pipeline.refiner else "",
        )

    async def ready(self) -> ModelCard:
        return await self.card()

    async def examine(self, prompt: str) -> PromptFacts:
        try:
            prompt, _ = take_tags(prompt, "prompt")
            tokens = self.pipeline.count_tokens(prompt)
        except InvalidParams as error:
            raise errors.of_params(error) from None
        if self.pipeline.checkpoint.name != MINI_NAME:
            return PromptFacts(tokens, self.max_prompt_tokens)
        files = self.pipeline.catalogue.listed("embedding")
        learned = {word for file in files for word in words_of(file.name)}
        unknown = [word for word in unknown_words(prompt) if word not in learned]
        return PromptFacts(tokens, self.max_prompt_tokens, tuple(unknown))

    async def generate(self, order: ImageOrder) -> AsyncGenerator[Update]:
        threads = self._started()
        outcome, job = "cancelled", None
        try:
            job = self._accept(order, threads)
            self._jobs.add(job)
            job.send(Queued(threads.denoiser.position(job.flight)))
            threads.encoder.submit(job)
            async with aclosing(job.updates()) as updates:
                async for update in updates:
                    if isinstance(update, Done):
                        outcome = "done"
                    yield update
        except Exception as error:
            # Its frames refer to the job, so the job would keep its LoRAs and pictures in memory.
            clear_frames(error.__traceback__)
            if isinstance(error, Refused):
                self.meters.refusals.labels(error.reason).inc()
            problem = as_problem(error)
            outcome = problem.code or "failed"
            raise problem from None
        finally:
            if job is not None:
                self._forget(job, threads)
                self._record_trace(job, outcome)
            self.meters.ended(outcome, job.timings if job else {})
            del job

    async def metrics(self) -> Sequence[Any]:
        metrics = self.meters.collect(self._started().denoiser.here, self.pipeline.engines)
        return labelled(metrics, model=self.pipeline.checkpoint.name)

    # -- state ------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        return self._started().denoiser.loop.limits

    @property
    def steps_taken(self) -> int:
        return self._started().denoiser.loop.steps_taken

    @property
    def rows_running(self) -> int:
        return sum(f.rows for f in self._started().denoiser.flights if f.state is State.RUNNING)

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def check_health(self) -> None:
        """Raises Unhealthy."""
        if self._threads is not None:
            self._threads.check()

    def outlook(self) -> Outlook:
        """Predict for a typical picture that arrives now."""
        return Outlook.of(self._started().denoiser.admission(), warmup.standard(self.pipeline))

    def demand(self) -> dict[str, float]:
        """Return in device seconds: the work that arrived per second since the last call, including
        refused orders, and the waiting work."""
        now, began_s = self.pipeline.clock(), self._demand_s
        arrived_s, self._arrived_s, self._demand_s = self._arrived_s, 0.0, now
        waiting_s = sum(f.work_s for f in self._started().denoiser.waiting)
        return {WORK: arrived_s / max(now - began_s, 1.0), QUEUE_S: waiting_s}

    def close(self) -> None:
        """End the threads; remaining orders end with a Problem."""
        self._is_closed = True
        if self._threads is None:
            return
        for job in list(self._jobs):
            job.send(errors.draining())
            self._forget(job, self._threads)
        self._threads.close()

    # -- one order --------------------------------------------------------------------------

    def _started(self) -> _Threads:
        if self._threads is None:
            raise errors.starting()
        return self._threads

    def _accept(self, order: ImageOrder, threads: _Threads) -> ImageJob:
        """Make the order's job, or refuse an order that cannot be served, before any work."""
        if self._is_closed:
            raise errors.draining()
        params = self.pipeline.resolve(order.params)
        # Before the prompt is tokenised: under overload a refusal must cost next to nothing.
        admission, flight = threads.denoiser.admission(), self._flight(order, params, threads)
        self._arrived_s += admission.costs.work_s(flight, admission.limits)
        admission.check_queue(flight)
        check_able(self.pipeline.engines, params)
        uses = self.pipeline.uses(params)
        check_schedules(params, self.pipeline.checkpoint.scheduler)
        images.check_metadata({**params.as_dict(), "model": self.pipeline.origin}, order.format)
        rows = self.pipeline.tokenize(params, [file for file, *_ in uses], self.max_prompt_tokens)
        assert rows[0] is not None
        chunks = len(rows[0][0].ids)
        delay_s = 0.0 if order.source is None else self._image_s(params, threads)
        flight = self._flight(order, params, threads, chunks)
        flight = flight.changed(variant=self.pipeline.variant(uses))
        flight = threads.denoiser.admit(flight, delay_s + self.pipeline.loading_s(uses))
        writer = threads.writer
        return ImageJob(
            order,
            params,
            uses,
            rows,
            flight,
            self.pipeline.clock,
            on_latents=writer.finish,
            on_preview=writer.preview,
            on_leg=partial(writer.enlarge, then=threads.encoder.begin_leg),
        )

    def _image_s(self, params: GenerationParams, threads: _Threads) -> float:
        """Predict the time to encode the order's image."""
        return threads.denoiser.loop.costs.image_s * self._relative_pixels(params)

    def _relative_pixels(self, params: GenerationParams) -> float:
        """Return the picture's pixels relative to the default size."""
        assert params.height and params.width
        return params.height * params.width / self.pipeline.sizes.default**2

    def _later_leg(self, params: GenerationParams, threads: _Threads, chunks: int) -> Leg | None:
        """Return the legs of an upscaled picture after the first."""
        if not params.is_upscaled:
            return None
        then, delay_s = params.legs[-1], 0.0
        assert then.height and then.width
        if params.upscaler != LATENT:
            decode_s = threads.denoiser.loop.costs.decode_s * self._relative_pixels(params)
            delay_s = decode_s + self._image_s(then, threads)
        axes = self.pipeline.axes(then.height, then.width, chunks)
        return Leg(axes, self.pipeline.plan(then), delay_s)

    def _flight(
        self, order: ImageOrder, params: GenerationParams, threads: _Threads, chunks: int = 1
    ) -> Flight:
        assert params.height and params.width
        return Flight(
            threads.denoiser.loop.new_id(),
            self.pipeline.axes(params.height, params.width, chunks),
            self.pipeline.plan(params),
            priority=order.priority,
            deadline_s=self.pipeline.clock() + order.deadline_s,
            client=order.client,
            weight=order.weight,
            request_id=order.request_id,
            rides=threads.denoiser.loop.limits.rides,
            windows=windows_of(params.controls or ()),
            image_windows=image_windows_of(params.image_prompts or ()),
            later=self._later_leg(params, threads, chunks),
            pasted=order.pasted_pixels / self.pipeline.sizes.default**2,
        )

    def _note_call(self, denoiser: Denoiser, group: Group, seconds: float) -> None:
        self.meters.observe(group, seconds)
        denoiser.report_call(group, seconds)

    def _record_trace(self, job: ImageJob, outcome: str) -> None:
        if self.tracer is None or not job.order.trace:
            return
        order, clock = job.order, self.pipeline.clock
        facts: dict[str, str | int] = {"outcome": outcome, "steps": job.params.all_steps}
        whole = TimedPart("image", job.began_s, clock(), facts)
        tracing.record(self.tracer, order.trace, order.request_id, whole, list(job.parts), clock)

    def _forget(self, job: ImageJob, threads: _Threads) -> None:
        job.is_cancelled = True
        threads.encoder.cancel(job)
        threads.denoiser.forget(job.flight)
        threads.denoiser.cancel(job)
        self._jobs.discard(job)
