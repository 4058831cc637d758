"""Prompts of new orders, encoded beside the denoising loop and then handed to it.

Orders that wait are encoded together. What an order's prompt alone decides (too long, too late) is
refused before the encoders run: under overload the refused must cost next to nothing.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from sdxl import deepcache
from sdxl.conditioning import Conditioning, tokenize_rows
from sdxl.cost import smoothed
from sdxl.inflight import Refused
from sdxl.params import InvalidParams
from sdxl.pipeline import ENCODE_BATCH, Pipeline
from sdxl.policy import Flight, Priority, Shape
from sdxl.specs import CHUNK
from serve.worker.denoiser import Denoiser
from serve.worker.job import Job
from serve.worker.side_stream import SideStream
from serve.worker.stalls import STALL_S, Calls

T = TypeVar("T")

LOW_PRIORITY_BATCH = 4
"""prompts of low priority that are encoded in one call"""
BODY = CHUNK - 2
"""tokens of text in a chunk"""


class PromptEncoder:
    def __init__(
        self, pipeline: Pipeline, denoiser: Denoiser, max_tokens: int, stall_s: float = STALL_S
    ) -> None:
        self.pipeline, self.denoiser = pipeline, denoiser
        self.calls = Calls("encoding a prompt", pipeline.clock, stall_s)
        self.max_chunks = math.ceil(max_tokens / BODY)
        self._stream = SideStream(pipeline.engines)
        self._waiting: deque[Job] = deque()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "encode")

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def waiting_before(self, priority: Priority) -> int:
        with self._lock:
            return sum(job.order.priority <= priority for job in self._waiting)

    def submit(self, job: Job) -> None:
        with self._lock:
            self._waiting.append(job)
        self._thread.submit(self._encode_waiting)

    def cancel(self, job: Job) -> None:
        """One that is past this stage is no error."""
        with self._lock, suppress(ValueError):
            self._waiting.remove(job)

    def call(self, function: Callable[[], T]) -> T:
        """Run it as prompts are encoded, and wait for what it returns."""
        return self._thread.submit(self._beside, function).result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    # -- on its thread ----------------------------------------------------------------------

    def _beside(self, function: Callable[[], T]) -> T:
        with self._stream.after():
            return function()

    def _encode_waiting(self) -> None:
        with self._lock:
            taken = self._most_urgent()
            for job in taken:
                self._waiting.remove(job)
        jobs = [job for job in taken if not job.is_cancelled and self._admits(job)]
        if not jobs:
            return
        try:
            conditionings = self._encode(jobs)
        except Exception as error:
            for job in jobs:
                job.failed(error)
            return
        for job, conditioning in zip(jobs, conditionings, strict=True):
            self._hand_over(job, conditioning)

    def _most_urgent(self) -> list[Job]:
        """Those of one class, in order of arrival. A few of low priority at a time: whoever comes
        meanwhile waits for them."""
        first = min((job.order.priority for job in self._waiting), default=Priority.INTERACTIVE)
        most = ENCODE_BATCH if first is Priority.INTERACTIVE else LOW_PRIORITY_BATCH
        urgent = (job for job in self._waiting if job.order.priority is first)
        return list(itertools.islice(urgent, most))

    def _admits(self, job: Job) -> bool:
        try:
            self._check(job)
        except Exception as refusal:
            job.failed(refusal)
            return False
        return True

    def _check(self, job: Job) -> None:
        checkpoint = self.pipeline.checkpoint
        rows = tokenize_rows(job.params, *checkpoint.tokenizers, checkpoint.force_zeros)
        assert rows[0] is not None
        chunks = len(rows[0][0].ids)
        if chunks > self.max_chunks:
            most = f"at most {self.max_chunks * BODY}, the negative prompt's likewise"
            raise InvalidParams("prompt", f"more than {(chunks - 1) * BODY} tokens", most)
        job.prompt_tokens = chunks * CHUNK
        scale = self.pipeline.engines.arch.vae_scale
        assert job.params.height and job.params.width
        shape = Shape(job.params.height // scale, job.params.width // scale, chunks * CHUNK)
        self._check_deadline(job, shape, len(rows))

    def _check_deadline(self, job: Job, shape: Shape, rows: int) -> None:
        if math.isinf(job.deadline_s):
            return
        params, now = job.params, self.pipeline.clock()
        plan = deepcache.plan(params.steps, params.cache_interval, params.deep_steps)
        flight = Flight(-1, shape, rows, plan, priority=job.order.priority)
        ready_s = self.denoiser.foresee(flight) + self.denoiser.loop.costs.encode_s
        if ready_s > job.deadline_s:
            raise Refused(
                f"ready in {ready_s - now:.2f} s, the deadline is in {job.deadline_s - now:.2f} s",
                ready_s - job.deadline_s,
            )

    def _encode(self, jobs: list[Job]) -> list[Conditioning]:
        began = self.pipeline.clock()
        is_long = any(job.prompt_tokens > CHUNK for job in jobs)
        with self.calls.watch(is_long):
            encode = partial(self.pipeline.encode, [job.params for job in jobs])
            conditionings = self._beside(encode)
        for made in conditionings:
            self._stream.give(made.context, made.pooled, made.time_ids)
        costs = self.denoiser.loop.costs
        costs.encode_s = smoothed(costs.encode_s, (self.pipeline.clock() - began) / len(jobs))
        return conditionings

    def _hand_over(self, job: Job, conditioning: Conditioning) -> None:
        try:
            request = self.pipeline.request(job.params, conditioning)
        except Exception as error:
            job.failed(error)
            return
        job.stage("encode_s")
        job.deep_steps = sum(request.plan)
        timed = replace(request, deadline_s=job.deadline_s, priority=job.order.priority)
        self.denoiser.submit(timed, job)
