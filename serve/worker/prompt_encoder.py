"""Encodes prompts of admitted orders, and images of edits, beside the loop; then submits them.

Waiting prompts are encoded together, in the order of the queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from sdxl.adapters import Adapters, NoRoom
from sdxl.conditioning import Conditioning
from sdxl.cost import smoothed
from sdxl.editing import SourceLatents
from sdxl.flight import Priority
from sdxl.inflight import DeadlineExceeded
from sdxl.pipeline import ENCODE_BATCH, Pipeline
from sdxl.source import SourceImage
from sdxl.specs import CHUNK
from serve.worker.denoiser import Denoiser
from serve.worker.job import ImageJob
from serve.worker.side_stream import SideStream
from serve.worker.stalls import STALL_S, Calls

T = TypeVar("T")

LOW_PRIORITY_BATCH = 4
"""The most low-priority prompts in one call."""
ROOM_S = 0.02
"""Pause between checks for room, while adapters of other requests fill the bank."""


class PromptEncoder:
    def __init__(self, pipeline: Pipeline, denoiser: Denoiser, stall_s: float = STALL_S) -> None:
        self.pipeline, self.denoiser = pipeline, denoiser
        self.calls = Calls("encoding a prompt", pipeline.clock, stall_s)
        self._stream = SideStream(pipeline.engines)
        self._waiting: list[ImageJob] = []
        self._without_room: list[ImageJob] = []
        """jobs whose LoRAs or ControlNets have no room; others overtake them"""
        self._is_retrying = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "encode")

    def submit(self, job: ImageJob) -> None:
        with self._lock:
            self._waiting.append(job)
        self._thread.submit(self._encode_waiting)

    def cancel(self, job: ImageJob) -> None:
        """Cancel. A job past this stage is ignored."""
        with self._lock:
            for jobs in (self._waiting, self._without_room):
                with suppress(ValueError):
                    jobs.remove(job)

    def begin_leg(self, job: ImageJob, source: SourceImage | SourceLatents) -> None:
        """Encode a later leg of a submitted job."""
        assert job.conditioning is not None
        sized = partial(self.pipeline.conditioned, job.leg, job.conditioning)
        self._thread.submit(self._submit_leg, job, "upscale_s", source, sized)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the encoding thread and wait for its result."""
        return self._thread.submit(self._stream.run, function).result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    # -- on its thread ----------------------------------------------------------------------

    def _encode_waiting(self) -> None:
        with self._lock:
            taken = self._most_urgent()
            for job in taken:
                self._waiting.remove(job)
        loaded = {job: each for job in taken if (each := self._adapters(job)) is not None}
        jobs = list(loaded)
        if not jobs:
            return
        try:
            conditionings = self._encode(jobs, list(loaded.values()))
        except Exception as error:
            for job in jobs:
                job.failed(error)
            return
        made = list(zip(jobs, conditionings, strict=True))
        # A job without an image need not wait for the images of others.
        for job, conditioning in sorted(made, key=lambda each: each[0].order.source is not None):
            prompted = partial(self.pipeline.prompted, conditioning, job.with_pictures)
            self._submit_leg(job, "encode_s", job.order.source, prompted)

    def _most_urgent(self) -> list[ImageJob]:
        """Return the first jobs of the first one's priority; few of low priority, since later
        orders wait for them."""
        waiting = sorted(self._waiting, key=lambda job: (job.order.priority, job.flight.due))
        first = waiting[0].order.priority if waiting else Priority.INTERACTIVE
        most = ENCODE_BATCH if first is Priority.INTERACTIVE else LOW_PRIORITY_BATCH
        return [job for job in waiting if job.order.priority is first][:most]

    def _adapters(self, job: ImageJob) -> Adapters | None:
        """Load the job's adapters; None if the job was cancelled, failed or waits for room."""
        if job.is_cancelled:
            return None
        try:
            return self._stream.run(partial(self.pipeline.adapters, job.uses))
        except NoRoom:
            if job.flight.deadline_s < self.pipeline.clock():
                job.failed(DeadlineExceeded("the deadline passed"))
                return None
            with self._lock:
                self._without_room.append(job)
            if not self._is_retrying:
                self._is_retrying = True
                self._thread.submit(self._retry)
        except Exception as error:
            job.failed(error)
        return None

    def _retry(self) -> None:
        time.sleep(ROOM_S)
        self._is_retrying = False
        with self._lock:
            self._waiting += self._without_room
            self._without_room = []
        self._encode_waiting()

    def _encode(self, jobs: list[ImageJob], adapters: list[Adapters]) -> list[Conditioning]:
        began = self.pipeline.clock()
        params, rows = [job.params for job in jobs], [job.rows for job in jobs]
        # A call of many long prompts may take far longer than one of a short prompt.
        chunks = sum(job.prompt_tokens for job in jobs) // CHUNK
        with self.calls.watch(max(chunks, ENCODE_BATCH).bit_length()):
            conditionings = self._stream.run(partial(self.pipeline.encode, params, rows, adapters))
        for made in conditionings:
            self._stream.give(*made.tensors)
        costs = self.denoiser.loop.costs
        costs.encode_s = smoothed(costs.encode_s, (self.pipeline.clock() - began) / len(jobs))
        return conditionings

    def _encode_image(self, job: ImageJob, source: SourceImage) -> SourceLatents:
        began = self.pipeline.clock()
        with self.calls.watch(source.size):
            latents = self._stream.run(partial(self.pipeline.encode_image, job.leg, source))
        costs = self.denoiser.loop.costs
        size = source.size[0] * source.size[1] / self.pipeline.sizes.default**2
        costs.image_s = smoothed(costs.image_s or None, (self.pipeline.clock() - began) / size)
        return latents

    def _submit_leg(
        self,
        job: ImageJob,
        stage: str,
        source: SourceImage | SourceLatents | None,
        condition: Callable[[], Conditioning],
    ) -> None:
        """Make the leg's request and submit it. `condition` makes the leg's conditioning."""
        if job.is_cancelled:
            return
        try:
            conditioning = self._stream.run(condition)
            self._stream.give(*conditioning.tensors)
            controls = self.pipeline.controls(job.leg, conditioning, job.with_pictures)
            latents = self._encode_image(job, source) if isinstance(source, SourceImage) else source
            # An inpainting checkpoint encodes an empty picture at each new size.
            request = self._stream.run(
                partial(self.pipeline.request, job.leg, conditioning, latents, controls)
            )
        except Exception as error:
            job.failed(error)
            return
        if job.conditioning is None:
            job.conditioning = conditioning
        job.stage(stage)
        self.denoiser.submit(request, job.leg_flight, job)
