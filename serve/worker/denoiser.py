"""The thread that owns an in-flight loop; images are submitted and cancelled through its inbox.

The methods of an image's job are called on this thread and must not block. It knows no asyncio, no
prompts and no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from sdxl.admission import Admission
from sdxl.cost import MEASURED, CostKey, Costs, project
from sdxl.flight import Flight, State
from sdxl.inflight import DeadlineExceeded, Event, Failed, InFlight, Request
from sdxl.policy import Group, line
from serve.worker.job import ImageJob
from serve.worker.loop_thread import LoopThread
from serve.worker.stalls import STALL_S, Unhealthy, patience_s

T = TypeVar("T")

ETA_PERIOD_S, ETA_SHARE = 0.1, 0.02
"""Completion times for progress events are recomputed after this period, or later if that would
take more than this share of the loop's time."""


@dataclass
class _Watched:
    job: ImageJob
    step: int = 0
    has_started: bool = False
    seen: tuple[int, int] = (-1, -1)
    """the step and position last reported"""


class Denoiser:
    def __init__(self, loop: InFlight, stall_s: float = STALL_S) -> None:
        self.loop, self.stall_s = loop, stall_s
        self.flights: tuple[Flight, ...] = ()
        """images in the loop after the last pass; safe to read from any thread"""
        self._coming: dict[int, Flight] = {}
        """admitted images that are not yet in the loop"""
        self._watched: dict[int, _Watched] = {}
        self._ready_s: dict[int, float] = {}
        self._ready_until_s = -math.inf
        """when they are recomputed"""
        self._thread = LoopThread("denoiser", self, loop.clock)

    # -- from any thread --------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def admit(self, newcomer: Flight, delay_s: float = 0.0) -> Flight:
        """Admit an image, or raise Refused; then `submit` or `forget` it. Call from one thread.
        `delay_s`: time before the first step, besides encoding the prompt."""
        admission = self.admission()
        admission = replace(admission, delay_s=admission.delay_s + delay_s)
        promised = admission.admit(newcomer, self.loop.time)
        self._coming[promised.id] = promised
        return promised

    def forget(self, promised: Flight) -> None:
        """Forget an admitted image. A submitted image is ignored."""
        self._coming.pop(promised.id, None)

    def submit(self, request: Request, promised: Flight, job: ImageJob) -> None:
        self._thread.send(partial(self._submit, request, promised, job))

    def cancel(self, job: ImageJob) -> None:
        """Cancel within one tick. An unknown or finished image is ignored."""
        self._thread.send(partial(self._cancel, job))

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the loop's thread between ticks and wait for its result."""
        answer: Future[T] = Future()
        self._thread.send(partial(self._run_function, function, answer))
        return answer.result()

    def admission(self) -> Admission:
        """Return the admission for a request that arrives now."""
        known, now = self.loop.costs, self.loop.clock()
        # A copy: the loop learns new costs meanwhile.
        others = {name: getattr(known, name) for name in (*MEASURED, "pasting_s")}
        costs = Costs(dict(known.ticks), **others)
        return Admission(self.here, self.loop.limits, costs, now, self.encoding_s + costs.encode_s)

    @property
    def encoding_s(self) -> float:
        """Predicted seconds until the prompts of all admitted images are encoded."""
        coming = list(self._coming)
        # Later legs of submitted images are encoded.
        return self.loop.costs.encode_s * sum(id_ not in self._watched for id_ in coming)

    @property
    def here(self) -> tuple[Flight, ...]:
        """All admitted, unfinished images in order of arrival."""
        # Read `_coming` first: an image may move from it to `flights` between the two reads.
        coming = list(self._coming.values())
        flights = self.flights
        known = {flight.id for flight in flights}
        return (*flights, *(flight for flight in coming if flight.id not in known))

    def position(self, promised: Flight) -> int:
        return [f.id for f in self.waiting].index(promised.id) + 1

    @property
    def waiting(self) -> list[Flight]:
        """Waiting images in queue order."""
        return line(self.here, self.loop.limits)

    def check(self) -> None:
        """Raise Unhealthy unless the loop has advanced lately and its engines work."""
        self._thread.check()
        still_s, allowed_s = self._time_without_progress()
        if still_s > allowed_s:
            raise Unhealthy(f"the loop has not advanced for {still_s:.1f} s")

    def _time_without_progress(self) -> tuple[float, float]:
        """Return for how long there was no progress, and how long the current work may take."""
        call = self.loop.call
        if call is None:
            # A call of minutes may have ended just now, long after the pass began.
            since_s = max(self._thread.beat_s, self.loop.settled_s)
            return self.loop.clock() - since_s, patience_s(None, self.stall_s)
        group, began_s = call
        costs = self.loop.costs
        usual_s = costs.ticks.get(CostKey(group.call, group.bucket))
        allowed_s = patience_s(usual_s, self.stall_s, costs.tick_s(group))
        return self.loop.clock() - began_s, allowed_s

    def stop(self, timeout_s: float | None = None) -> None:
        """Finish the submitted images, then end the thread."""
        self._thread.stop(timeout_s)

    # -- on the loop's thread ---------------------------------------------------------------

    def report_call(self, group: Group, seconds: float) -> None:
        """Notify the images of an engine call that ended now."""
        ended_s = self.loop.clock()
        for id_ in group.ids:
            if id_ in self._watched:
                self._watched[id_].job.ran(group, ended_s - seconds, ended_s)

    @property
    def is_idle(self) -> bool:
        return self.loop.is_idle

    def fail_all(self, cause: Exception) -> None:
        for watched in self._watched.values():
            watched.job.failed(cause)

    def advance(self) -> None:
        if self.is_idle:
            return
        before, began_s = self.loop.steps_taken, self.loop.clock()
        events = self.loop.tick()
        self._record_failures(events, self.loop.steps_taken > before)
        self.flights = self.loop.flights
        running = (f.id for f in self.flights if f.state is not State.QUEUED)
        self._report_starts([*(e.id for e in events), *running], began_s)
        self._report_steps()
        for event in events:
            self._report_end(event)

    def _run_function(self, function: Callable[[], T], answer: Future[T]) -> None:
        try:
            with self.loop.engines.on_stream():
                result = function()
                self.loop.engines.fence().wait()
        except Exception as error:
            answer.set_exception(error)
        else:
            # The function may have taken longer than a pass may.
            self._thread.beat_s = self.loop.clock()
            answer.set_result(result)

    def _submit(self, request: Request, promised: Flight, job: ImageJob) -> None:
        try:
            # The image's `cancel` may have come before this message.
            if not job.is_cancelled:
                self._watched[self.loop.submit(request, promised)] = _Watched(job)
                self.flights = self.loop.flights
        except Exception as error:
            job.failed(error)
        finally:
            self.forget(promised)
            if promised.id in self._watched and promised.later is not None:
                # `here` lists the next leg once this leg has left the loop.
                self._coming[promised.id] = promised.next_leg

    def _cancel(self, job: ImageJob) -> None:
        id_ = job.flight.id
        if self._watched.pop(id_, None) is not None:
            self.loop.cancel(id_)
            self._coming.pop(id_, None)
            self.flights = self.loop.flights

    def _report_end(self, event: Event) -> None:
        watched = self._watched.pop(event.id, None)
        if watched is None:
            return
        if isinstance(event, Failed):
            self._coming.pop(event.id, None)
            watched.job.failed(event.cause)
        else:
            watched.job.finished(event.latents)

    def _record_failures(self, events: list[Event], has_advanced: bool) -> None:
        causes = [event.cause for event in events if isinstance(event, Failed)]
        has_failed = any(not isinstance(cause, DeadlineExceeded) for cause in causes)
        if has_advanced or has_failed:
            self._thread.record_calls(has_failed=not has_advanced)

    def _report_starts(self, ids: list[int], at_s: float) -> None:
        for id_ in ids:
            watched = self._watched.get(id_)
            if watched is not None and not watched.has_started:
                watched.has_started = True
                watched.job.started(at_s)

    def _report_steps(self) -> None:
        positions = {f.id: n for n, f in enumerate(line(self.flights, self.loop.limits), 1)}
        for flight in self.flights:
            watched = self._watched.get(flight.id)
            if watched is None:
                continue
            if flight.step != watched.step:
                watched.step = flight.step
                self._preview(flight, watched.job)
            seen = flight.step, positions.get(flight.id, 0)
            if watched.job.order.wants_progress and seen != watched.seen:
                watched.seen = seen
                watched.job.stepped(flight, seen[1], self._ready(flight.id))

    def _preview(self, flight: Flight, job: ImageJob) -> None:
        if flight.step in job.preview_steps:
            latents = self.loop.preview(flight.id)
            if latents is not None:
                job.previewed(flight.step, latents)

    def _ready(self, id_: int) -> float:
        now = self.loop.clock()
        if now >= self._ready_until_s or id_ not in self._ready_s:
            begin_s = now + self.encoding_s
            self._ready_s = project(self.here, self.loop.limits, self.loop.costs, begin_s)
            took_s = self.loop.clock() - now
            self._ready_until_s = now + max(ETA_PERIOD_S, took_s / ETA_SHARE)
        return self._ready_s[id_]
