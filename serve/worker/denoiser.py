"""The one thread that owns an in-flight loop: images come in and leave through an inbox.

Whoever watches an image is told on this thread what becomes of it, and must not block here. It
knows no asyncio, no prompts and no files.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from sdxl.cost import Costs, Key, project
from sdxl.inflight import DeadlineExceeded, Event, Failed, InFlight, Request
from sdxl.policy import Flight, Group, Priority, State
from serve.worker.stalls import STALL_S, Unhealthy, patience_s

log = logging.getLogger(__name__)
T = TypeVar("T")

BEAT_S = 0.5
"""An idle loop still passes this often, so that its health can be seen."""
ETA_PERIOD_S = 0.1
"""How often completion times are computed anew for those who watch."""
SICK_AFTER = 3
"""Ticks in a row in which every engine call failed, after which the engines are given up."""


class Watcher(Protocol):
    """Told on the loop's thread. Times are on the loop's clock."""

    @property
    def wants_progress(self) -> bool: ...
    @property
    def preview_steps(self) -> tuple[int, ...]: ...
    @property
    def is_cancelled(self) -> bool:
        """Nobody waits any more."""
        ...

    def admitted(self, position: int) -> None: ...
    def started(self, at_s: float) -> None: ...
    def ran(self, group: Group, began_s: float, ended_s: float) -> None: ...
    def stepped(self, flight: Flight, position: int, ready_s: float) -> None: ...
    def previewed(self, step: int, latents: Tensor) -> None: ...
    def finished(self, latents: Tensor) -> None: ...
    def failed(self, cause: Exception) -> None: ...


@dataclass
class _Watched:
    watcher: Watcher
    step: int = 0
    has_started: bool = False
    seen: tuple[int, int] = (-1, -1)
    """the step and position last told"""


class Denoiser:
    def __init__(self, loop: InFlight, stall_s: float = STALL_S) -> None:
        self.loop, self.stall_s = loop, stall_s
        self.flights: tuple[Flight, ...] = ()
        """as of the last pass; safe to read from any thread"""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watched: dict[int, _Watched] = {}
        self._ids: dict[int, int] = {}
        self._ready_s: dict[int, float] = {}
        self._ready_from_s = -math.inf
        self._failures = 0
        self._beat_s = loop.clock()
        self._is_stopping = False
        self._death: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="denoiser", daemon=True)

    # -- from any thread --------------------------------------------------------------------

    def start(self) -> None:
        self._beat_s = self.loop.clock()
        self._thread.start()

    def submit(self, request: Request, watcher: Watcher) -> None:
        self._inbox.put(partial(self._admit, request, watcher))

    def cancel(self, watcher: Watcher) -> None:
        """Within one tick. One that was never submitted, or is done, is no error."""
        self._inbox.put(partial(self._drop, watcher))

    def call(self, function: Callable[[], T]) -> T:
        """Run it on the loop's thread, between ticks, and wait until it is computed."""
        answer: Future[T] = Future()
        self._inbox.put(partial(self._answer, function, answer))
        return answer.result()

    def foresee(self, newcomer: Flight) -> float:
        """When an image that came now would be ready, on the loop's clock."""
        return self._project((*self.flights, newcomer), [newcomer.id])[newcomer.id]

    def first_end_s(self) -> float:
        """When the first of those that run is done, and a place is free."""
        running = [f for f in self.flights if f.state is not State.QUEUED]
        return min(self._project(running).values(), default=self.loop.clock())

    @property
    def waiting(self) -> int:
        return sum(f.state is State.QUEUED for f in self.flights)

    def waiting_before(self, priority: Priority) -> int:
        """Those that one of this priority would stand behind."""
        return sum(f.state is State.QUEUED and f.priority <= priority for f in self.flights)

    def _project(
        self, flights: Sequence[Flight], of: Collection[int] | None = None
    ) -> dict[int, float]:
        known = self.loop.costs
        # A copy: the loop learns new costs meanwhile.
        costs = Costs(dict(known.ticks), known.encode_s, known.decode_s)
        return project(flights, self.loop.limits, costs, self.loop.clock(), of)

    def check(self) -> None:
        """Raise Unhealthy unless the loop has advanced lately and its engines work."""
        if self._death is not None:
            raise Unhealthy(f"the denoising loop died: {type(self._death).__name__}")
        still_s, allowed_s = self._still()
        if still_s > allowed_s:
            raise Unhealthy(f"the loop has not advanced for {still_s:.1f} s")
        if self._failures >= SICK_AFTER:
            raise Unhealthy(f"the engines failed {self._failures} times in a row")

    def _still(self) -> tuple[float, float]:
        """For how long nothing has come of what the loop does now, and how long it may take."""
        call = self.loop.call
        if call is None:
            return self.loop.clock() - self._beat_s, patience_s(None, self.stall_s)
        group, began_s = call
        usual_s = self.loop.costs.ticks.get(Key(group.network, group.shape, group.bucket))
        return self.loop.clock() - began_s, patience_s(usual_s, self.stall_s)

    def stop(self, timeout_s: float | None = None) -> None:
        """Finish what was submitted, then end the thread."""
        self._is_stopping = True
        self._inbox.put(lambda: None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- on the loop's thread ---------------------------------------------------------------

    def tell_call(self, group: Group, seconds: float) -> None:
        """To all whose images were in an engine call that ended now."""
        ended_s = self.loop.clock()
        for id_ in group.ids:
            if id_ in self._watched:
                self._watched[id_].watcher.ran(group, ended_s - seconds, ended_s)

    def _run(self) -> None:
        try:
            while not (self._is_stopping and self._inbox.empty() and self.loop.is_idle):
                self._read_inbox()
                self._beat_s = self.loop.clock()
                if not self.loop.is_idle:
                    self._pass()
        except Exception as death:
            log.exception("the denoising loop died")
            self._death = death
            for watched in self._watched.values():
                watched.watcher.failed(Unhealthy("the denoising loop died"))

    def _read_inbox(self) -> None:
        try:
            message = self._inbox.get(self.loop.is_idle, BEAT_S)
            while True:
                message()
                message = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _pass(self) -> None:
        before, began_s = self.loop.steps_taken, self.loop.clock()
        events = self.loop.tick()
        self._judge(events, self.loop.steps_taken > before)
        self.flights = self.loop.flights
        running = (f.id for f in self.flights if f.state is not State.QUEUED)
        self._tell_starts([*(e.id for e in events), *running], began_s)
        self._tell_steps()
        for event in events:
            self._tell_end(event)

    def _answer(self, function: Callable[[], T], answer: Future[T]) -> None:
        try:
            with self.loop.engines.on_stream():
                found = function()
                self.loop.engines.fence()()
        except Exception as error:
            answer.set_exception(error)
        else:
            # It may have taken longer than a loop may stand still.
            self._beat_s = self.loop.clock()
            answer.set_result(found)

    def _admit(self, request: Request, watcher: Watcher) -> None:
        if watcher.is_cancelled:
            # Its `cancel` came before it.
            return
        try:
            id_ = self.loop.submit(request)
        except Exception as refusal:
            watcher.failed(refusal)
            return
        self._watched[id_] = _Watched(watcher)
        self._ids[id(watcher)] = id_
        self.flights = self.loop.flights
        self._ready_from_s = -math.inf
        watcher.admitted(self.waiting)

    def _drop(self, watcher: Watcher) -> None:
        id_ = self._ids.pop(id(watcher), None)
        if id_ is not None:
            self.loop.cancel(id_)
            self._watched.pop(id_, None)
            self.flights = self.loop.flights

    def _tell_end(self, event: Event) -> None:
        watched = self._watched.pop(event.id, None)
        if watched is None:
            return
        self._ids.pop(id(watched.watcher), None)
        if isinstance(event, Failed):
            watched.watcher.failed(event.cause)
        else:
            watched.watcher.finished(event.latents)

    def _judge(self, events: list[Event], has_advanced: bool) -> None:
        if has_advanced:
            self._failures = 0
        elif any(isinstance(e, Failed) and not _is_late(e) for e in events):
            self._failures += 1

    def _tell_starts(self, ids: list[int], at_s: float) -> None:
        for id_ in ids:
            watched = self._watched.get(id_)
            if watched is not None and not watched.has_started:
                watched.has_started = True
                watched.watcher.started(at_s)

    def _tell_steps(self) -> None:
        position = 0
        for flight in self.flights:
            position += flight.state is State.QUEUED
            watched = self._watched.get(flight.id)
            if watched is None:
                continue
            if flight.step != watched.step:
                watched.step = flight.step
                self._preview(flight, watched.watcher)
            seen = flight.step, position if flight.state is State.QUEUED else 0
            if watched.watcher.wants_progress and seen != watched.seen:
                watched.seen = seen
                watched.watcher.stepped(flight, seen[1], self._ready(flight.id))

    def _preview(self, flight: Flight, watcher: Watcher) -> None:
        if flight.step in watcher.preview_steps:
            latents = self.loop.preview(flight.id)
            if latents is not None:
                watcher.previewed(flight.step, latents)

    def _ready(self, id_: int) -> float:
        now = self.loop.clock()
        if now - self._ready_from_s >= ETA_PERIOD_S or id_ not in self._ready_s:
            self._ready_s, self._ready_from_s = self.loop.finish_times(), now
        return self._ready_s[id_]


def _is_late(event: Failed) -> bool:
    return isinstance(event.cause, DeadlineExceeded)
