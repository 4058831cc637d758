"""The one denoising loop: images join, run, pause and leave at any tick, and share UNet calls.

`tick` asks the policy what to run, makes one engine call per group, and takes one scheduler step
for every image in it. It serves a single picture, a batch, a server and the offline job alike. It
has no thread and no clock of its own, and knows no pictures and no HTTP; it yields latents.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdxl import schedulers
from sdxl.admission import Admission
from sdxl.cohort import BufferPool, Cohort, NewImage, RowSlot
from sdxl.conditioning import Conditioning
from sdxl.cost import Costs, project
from sdxl.deepcache import StepPlan
from sdxl.editing import KeptPart, SourceLatents, begin
from sdxl.engine import Engines
from sdxl.fairness import VirtualTime
from sdxl.flight import Flight, Priority, State
from sdxl.noise import NoiseSource
from sdxl.policy import Group, Limits, plan_tick

TREND, NOISE = (schedulers.COLUMNS.index(name) for name in ("c", "d"))


class DeadlineExceeded(RuntimeError):
    """An admitted image missed its deadline."""


@dataclass(frozen=True)
class Request:
    """One image to denoise: all that the loop needs, independent of the source of the request."""

    conditioning: Conditioning
    table: schedulers.Table
    plan: StepPlan
    guidance: float
    seed: int
    latent_h: int
    latent_w: int
    priority: Priority = Priority.INTERACTIVE
    deadline_s: float = math.inf
    """on the loop's clock, picture included"""
    client: str = ""
    weight: float = 1.0
    source: SourceLatents | None = None
    """start in place of noise; the table starts there, too"""

    def __post_init__(self) -> None:
        if self.plan.room[0] > self.conditioning.rows:
            raise ValueError("a guided step needs a negative prompt in the conditioning")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis sizes by their names in sdxl/specs.py."""
        tokens = self.conditioning.tokens
        return {"latent_h": self.latent_h, "latent_w": self.latent_w, "tokens": tokens}


class Finished(NamedTuple):
    id: int
    latents: Tensor
    """[channels, h, w], float32"""


class Failed(NamedTuple):
    id: int
    cause: Exception


Event = Finished | Failed


@dataclass
class _Image:
    """The loop's state of one image besides its Flight."""

    request: Request
    noise: NoiseSource
    place: RowSlot | None = None
    kept: KeptPart | None = None
    masked: Tensor | None = None

    def new_image(self, is_guided: bool, device: torch.device) -> NewImage:
        """Return the input of `unet_prompt` for this image: before its first step, or when guidance
        returns and its negative row is computed again."""
        request, source, estimate = self.request, self.request.source, None
        if self.place is not None:
            cohort, index = self.place.cohort, self.place.index
            latents, estimate = cohort.latents[index], cohort.estimate[index]
        elif source is None:
            latents = self.noise.start() * request.table.start
        else:
            latents, self.kept, self.masked = begin(source, request.table, self.noise, device)
        return NewImage(
            request.conditioning, request.guidance, latents, estimate, is_guided, self.masked
        )


@dataclass(frozen=True)
class _Launch:
    """A group whose engine call is running."""

    group: Group
    ends: tuple[int, ...]
    """images that end with this step"""
    began_s: float
    wait: Callable[[], None]


@dataclass
class InFlight:
    """See the module. `clock` gives seconds; `limits.rows` may be changed between ticks."""

    engines: Engines
    clock: Callable[[], float]
    limits: Limits
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self.time = VirtualTime()
        self._images: dict[int, _Image] = {}
        self._ids = itertools.count()
        self._pool = BufferPool(self.engines)
        self._launched: deque[_Launch] = deque()
        self.settled_s = -math.inf
        self.steps_taken = 0
        self.call: tuple[Group, float] | None = None
        """the current engine call and its start; read by other threads"""

    # -- what a caller says -----------------------------------------------------------------

    def submit(self, request: Request, admitted: Flight | None = None) -> int:
        """Accept an image, or raise Refused (admission.py); one that was `admitted` before keeps
        its promise."""
        flight = admitted or self.admission().admit(self._flight(request), self.time)
        self._flights[flight.id] = flight
        noise = NoiseSource(request.seed, self._latent_dims(request))
        self._images[flight.id] = _Image(request, noise)
        return flight.id

    def new_id(self) -> int:
        """Return the id of an image to be submitted."""
        return next(self._ids)

    def cancel(self, id_: int) -> None:
        """Drop an image from the next tick on. Unknown or finished ids are no error: the caller may
        be late."""
        self._drop(id_)

    def pause(self, id_: int) -> None:
        self._flights[id_] = replace(self._flights[id_], is_held=True)

    def resume(self, id_: int) -> None:
        self._flights[id_] = replace(self._flights[id_], is_held=False)

    # -- what a caller asks -----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True if nothing is in flight and no result waits to be collected."""
        return not self._flights and not self._launched

    @property
    def flights(self) -> tuple[Flight, ...]:
        """The unfinished images in order of arrival."""
        return tuple(f for f in self._flights.values() if not f.is_done)

    def admission(self) -> Admission:
        return Admission(self.flights, self.limits, self.costs, self.clock())

    def finish_times(self) -> dict[int, float]:
        """Predict when each image will be ready, on the loop's clock, from measured costs."""
        return project(self.flights, self.limits, self.costs, self.clock())

    def preview(self, id_: int) -> Tensor | None:
        """Return the picture as the model expects it, in latents; None before its first step."""
        image = self._images.get(id_)
        if image is None or image.place is None or self._flights[id_].step == 0:
            return None
        with self.engines.on_stream():
            return image.place.cohort.estimate[image.place.index].clone()

    # -- the loop ---------------------------------------------------------------------------

    def tick(self) -> list[Event]:
        """Do one step for every runnable image; return what finished or failed."""
        with self.engines.on_stream():
            return self._tick()

    def _tick(self) -> list[Event]:
        events: list[Event] = []
        plan = plan_tick(self.flights, self.limits, self.clock())
        for id_ in plan.expired:
            self._fail(id_, DeadlineExceeded("the deadline passed"), events)
        for id_ in plan.paused:
            self._set_state(id_, State.PAUSED)
            self._park(id_)
        for id_ in (*plan.admitted, *plan.resumed):
            self._set_state(id_, State.RUNNING)
        for group in plan.groups:
            self._launch(group, events)
            self._settle(self.engines.calls_ahead, events)
        if not plan.groups:
            self._settle(0, events)
        return events

    def drain(self) -> list[Event]:
        """Tick until nothing can run."""
        events: list[Event] = []
        while any(not f.is_held for f in self._flights.values()) or self._launched:
            events += self.tick()
        return events

    def _launch(self, group: Group, events: list[Event]) -> None:
        began = self.clock()
        self.call = group, began
        try:
            cohort = self._gather(group)
            self._step(group, cohort)
            wait = self.engines.fence()
        except Exception as cause:
            # The call is shared, so its images share its fate; the others go on.
            for id_ in group.ids:
                self._fail(id_, cause, events)
            return
        finally:
            self.call = None
        for id_ in group.ids:
            self._flights[id_] = self._flights[id_].advanced()
        self.steps_taken += len(group.ids)
        ends = tuple(id_ for id_ in group.ids if self._flights[id_].is_done)
        self._launched.append(_Launch(group, ends, began, wait))

    def _step(self, group: Group, cohort: Cohort) -> None:
        rows = np.array(
            [self._images[id_].request.table.rows[self._flights[id_].step] for id_ in group.ids],
            np.float32,
        )
        cohort.buffers.fill("coefficients", torch.from_numpy(rows))
        reads_estimate, is_noisy = (bool(rows[:, column].any()) for column in (TREND, NOISE))
        if is_noisy:
            cohort.buffers.fill("noise", self._draw(group.ids, cohort, rows))
        engine = self.engines[group.network]

        def work() -> None:
            with torch.inference_mode():
                cohort.prepare()
                engine(cohort.inputs(engine.spec), cohort.outputs(engine.spec))
                cohort.advance(reads_estimate=reads_estimate, is_noisy=is_noisy)

        kind = len(group.ids), cohort.is_guided, reads_estimate, is_noisy
        buffers = cohort.buffers
        self.engines.run_recorded((group.network, kind, buffers.key, buffers.addresses), work)
        self._restore(group.ids, cohort)

    def _restore(self, ids: tuple[int, ...], cohort: Cohort) -> None:
        """Restore the masked part of images that have a mask."""
        for index, id_ in enumerate(ids):
            image = self._images[id_]
            if image.kept is not None:
                after = self._flights[id_].step + 1
                with torch.inference_mode():
                    image.kept.restore(cohort.latents[index], image.request.table, after)

    def _settle(self, calls_ahead: int, events: list[Event]) -> None:
        """Wait for calls beyond `calls_ahead`, observe their cost, return finished images."""
        while len(self._launched) > calls_ahead:
            launch = self._launched.popleft()
            self.call = launch.group, self.clock()
            launch.wait()
            self.call, ended = None, self.clock()
            self.costs.observe(launch.group, ended - max(launch.began_s, self.settled_s))
            self.settled_s = ended
            for id_ in launch.ends:
                image = self._images.get(id_)
                if image is not None:
                    assert image.place is not None
                    latents = image.place.cohort.latents[image.place.index]
                    events.append(Finished(id_, latents.clone()))
                    self._drop(id_)

    # -- state ------------------------------------------------------------------------------

    def _flight(self, request: Request) -> Flight:
        return Flight(
            self.new_id(),
            self.engines["unet_deep"].spec.shared_axes(request.sizes),
            request.plan,
            priority=request.priority,
            deadline_s=request.deadline_s,
            client=request.client,
            weight=request.weight,
        )

    def _latent_dims(self, request: Request) -> tuple[int, int, int]:
        return self.engines.arch.latent_channels, request.latent_h, request.latent_w

    def _set_state(self, id_: int, state: State) -> None:
        self._flights[id_] = replace(self._flights[id_], state=state)

    def _fail(self, id_: int, cause: Exception, events: list[Event]) -> None:
        self._drop(id_)
        events.append(Failed(id_, cause))

    def _drop(self, id_: int) -> None:
        flight = self._flights.pop(id_, None)
        if flight is not None:
            for moved in self.time.leave(flight, list(self._flights.values())):
                self._flights[moved.id] = moved
        image = self._images.pop(id_, None)
        if image is not None and image.place is not None:
            self._pool.leave(image.place)

    def _gather(self, group: Group) -> Cohort:
        """Return the group's cohort: the same as in the last tick if possible, else a new one."""
        images = [self._images[id_] for id_ in group.ids]
        guided = tuple(self._flights[id_].next_step.is_guided for id_ in group.ids)
        places = [image.place for image in images]
        first = places[0]
        if first is not None and first.cohort.holds(places, guided, group.bucket):
            return first.cohort
        beginners = tuple(id_ for id_ in group.ids if self._images[id_].place is None)
        returning = tuple(
            id_
            for id_, place, is_guided in zip(group.ids, places, guided, strict=True)
            if place is not None and is_guided and not place.has_negative_row
        )
        for ids in (beginners, returning):
            if ids:
                cohort = self._begin(ids, group)
                if ids == group.ids:
                    return cohort
        cohort = self._pool.form(
            [image.place for image in images if image.place],
            guided,
            group.bucket,
            reads_cache=group.network == "unet_shallow",
            runs=True,
        )
        self._move(group.ids, cohort)
        return cohort

    def _begin(self, ids: tuple[int, ...], group: Group) -> Cohort:
        """Begin images with `unet_prompt`; the result is the group's cohort if they are all of
        it."""
        steps = [self._flights[id_].next_step for id_ in ids]
        cohort = self._pool.begin(
            group.call.axes,
            [
                self._images[id_].new_image(step.is_guided, self.engines.device)
                for id_, step in zip(ids, steps, strict=True)
            ],
            self.limits.bucket(sum(step.rows for step in steps)),
            runs=ids == group.ids,
        )
        self._move(ids, cohort)
        return cohort

    def _park(self, id_: int) -> None:
        """Move a paused image to its own small buffers."""
        place, flight = self._images[id_].place, self._flights[id_]
        if place is not None:
            is_guided = flight.next_step.is_guided and place.has_negative_row
            cohort = self._pool.form(
                [place],
                (is_guided,),
                2 if is_guided else 1,
                reads_cache=flight.needs_cache,
                runs=False,
            )
            self._move((id_,), cohort)

    def _move(self, ids: tuple[int, ...], cohort: Cohort) -> None:
        for index, id_ in enumerate(ids):
            old = self._images[id_].place
            if old is not None:
                self._pool.leave(old)
            self._images[id_].place = RowSlot(cohort, index)

    def _draw(self, ids: tuple[int, ...], cohort: Cohort, rows: NDArray[np.float32]) -> Tensor:
        """Draw fresh noise for images whose scheduler uses it, each from its own generator."""
        zero = torch.zeros(cohort.latents.shape[1:])
        drawn = [
            self._images[id_].noise.next() if is_noisy else zero
            for id_, is_noisy in zip(ids, rows[:, NOISE] != 0, strict=True)
        ]
        return torch.stack(drawn)
