"""The one denoising loop: images join, run, pause and leave at any tick, and share UNet calls.

`tick` asks the policy what to run, makes one engine call per group, and takes one scheduler step
for every image in it. It serves a single picture, a batch, a server and the offline job alike. It
has no thread and no clock of its own, and knows no pictures and no HTTP; it yields latents.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sdxl import schedulers
from sdxl.admission import Admission
from sdxl.conditioning import Conditioning
from sdxl.control_calls import ControlState
from sdxl.control_inputs import ControlInput
from sdxl.controls import Window
from sdxl.cost import Costs, project
from sdxl.deepcache import StepPlan
from sdxl.editing import KeptPart, SourceLatents, begin
from sdxl.engine import Engines, Fence
from sdxl.fairness import VirtualTime
from sdxl.flight import Flight, Priority, State, Variant
from sdxl.image_prompts import ImageWindow
from sdxl.layout import ImageTensors, Layout, Member, stacked_by_width
from sdxl.noise import NoiseSource, Variation
from sdxl.policy import Group, Limits, plan_tick
from sdxl.rows import Stage
from sdxl.specs import Axes

NOISE = schedulers.COLUMNS.index("d")


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
    controls: tuple[ControlInput, ...] = ()
    """by net"""
    variation: Variation | None = None
    """of the noise"""

    def __post_init__(self) -> None:
        if self.plan.room[0] > self.conditioning.rows:
            raise ValueError("a guided step needs a negative prompt in the conditioning")
        if self.plan.refined_from is not None and self.conditioning.refined is None:
            raise ValueError("a refined step needs the refiner's conditioning")

    @property
    def variant(self) -> Variant:
        """What its rows need of a call, except image prompts."""
        own = self.conditioning.adapters.variant
        return own._replace(is_controlled=bool(self.controls))

    @property
    def windows(self) -> tuple[Window, ...]:
        return tuple(each.window for each in self.controls)

    @property
    def image_windows(self) -> tuple[ImageWindow, ...]:
        return tuple(each.window for each in self.conditioning.images)


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
    tensors: ImageTensors | None = None
    """None before its first step"""
    has_refined_text: bool | None = None
    """whether its text is the refiner's; None before its first step"""
    kept: KeptPart | None = None

    def text(self, *, is_refined: bool) -> Conditioning:
        """What a model's text is computed from."""
        own = self.request.conditioning
        if not is_refined:
            return own
        assert own.refined is not None
        return own.refined

    def begin(self, engines: Engines) -> ImageTensors:
        request, source, masked = self.request, self.request.source, None
        if source is None:
            latents = self.noise.start() * request.table.start
        else:
            latents, self.kept, masked = begin(source, request.table, self.noise, engines.device)
        slot = engines.slot(request.latent_h, request.latent_w, request.variant)
        latents, pages = latents.to(engines.device), request.conditioning.adapters.unet
        rows = request.plan.room[0]
        controls = [ControlState(each, request.conditioning, rows) for each in request.controls]
        prompts = [stacked_by_width(each.text) for each in request.conditioning.images]
        own = latents, request.guidance, masked, slot, pages, controls, prompts
        self.tensors = ImageTensors(*own)
        return self.tensors


@dataclass(frozen=True)
class _Launch:
    """A group whose engine call is running."""

    group: Group
    ends: tuple[int, ...]
    """images that end with this step"""
    began_s: float
    start: Fence
    end: Fence
    is_usual: bool
    """whether the call took its usual time: a first one is also compiled or recorded"""


@dataclass
class InFlight:
    """See the module. `clock` gives seconds; `limits.rows` may be changed between ticks."""

    engines: Engines
    clock: Callable[[], float]
    limits: Limits
    costs: Costs = field(default_factory=Costs)
    stage: Stage | None = None
    """Loops that run in turn may share one."""
    refiner: Stage | None = None
    """that of the refiner, which takes the last steps of requests that name it"""

    def __post_init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self.time = VirtualTime()
        self._images: dict[int, _Image] = {}
        self._ids = itertools.count()
        self._stage = self.stage or Stage(self.engines)
        self._launched: deque[_Launch] = deque()
        self.settled_s = -math.inf
        """end of the last call"""
        self._busy_from_s = -math.inf
        """when an image came to an idle loop"""
        self.steps_taken = 0
        self.call: tuple[Group, float] | None = None
        """the current engine call and its start; read by other threads"""

    # -- what a caller says -----------------------------------------------------------------

    def submit(self, request: Request, admitted: Flight | None = None) -> int:
        """Accept an image, or raise Refused (admission.py); one that was `admitted` before keeps
        its promise."""
        flight = admitted or self.admission().admit(self._flight(request), self.time)
        if self.is_idle:
            self._busy_from_s = self.clock()
        # What files need is known for certain only once they are loaded.
        flight = flight.changed(
            axes=self._axes(request),
            variant=request.variant,
            windows=request.windows,
            image_windows=request.image_windows,
        )
        self._flights[flight.id] = flight.changed(rides=self.limits.rides)
        noise = NoiseSource(request.seed, self._latent_dims(request), request.variation)
        self._images[flight.id] = _Image(request, noise)
        return flight.id

    def new_id(self) -> int:
        """Return the id of an image to be submitted."""
        return next(self._ids)

    def cancel(self, id_: int) -> None:
        """Drop an image from the next tick on. Unknown or finished ids are no error: the caller may
        be late."""
        self._drop(id_)

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
        if image is None or image.tensors is None or self._flights[id_].step == 0:
            return None
        with self.engines.on_stream():
            return image.tensors.picture(image.tensors.estimate).clone()

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
        for id_ in (*plan.admitted, *plan.resumed):
            self._set_state(id_, State.RUNNING)
        for group in plan.groups:
            for call in (*group.nets, group):
                self._launch(call, group, events)
                self._settle(self.engines.calls_ahead, events)
        if not plan.groups:
            self._settle(0, events)
        return events

    def drain(self) -> list[Event]:
        """Tick until nothing is left."""
        events: list[Event] = []
        while self._flights or self._launched:
            events += self.tick()
        return events

    def _launch(self, group: Group, whole: Group, events: list[Event]) -> None:
        """Launch a group's call, or one of a ControlNet before it."""
        group = self._left(group)
        if not group.ids:
            return
        began = self.clock()
        self.call = group, began
        try:
            self._begin(self._left(whole))
            start = self.engines.fence()
            is_usual = self._control(group) if group.call.net else self._step(group)
            end = self.engines.fence()
        except Exception as cause:
            # The call is shared, so its images share its fate; the others go on.
            for id_ in group.ids:
                self._fail(id_, cause, events)
            return
        finally:
            self.call = None
        if group.call.net:
            self._launched.append(_Launch(group, (), began, start, end, is_usual))
            return
        for id_ in group.ids:
            flight = self._flights[id_] = self._flights[id_].advanced()
            self._tensors(id_).keeps_cache = not flight.is_done and flight.needs_cache
        self.steps_taken += len(group.ids)
        ends = tuple(id_ for id_ in group.ids if self._flights[id_].is_done)
        self._launched.append(_Launch(group, ends, began, start, end, is_usual))

    def _left(self, group: Group) -> Group:
        """The group without images that an earlier call failed for."""
        is_left = [id_ in self._flights for id_ in group.ids]
        ids, places = (tuple(compress(each, is_left)) for each in (group.ids, group.places))
        return replace(group, ids=ids, places=places)

    def _begin(self, group: Group) -> None:
        """Compute the text of the group's images that begin, or go over to the refiner."""
        is_refined, stage = group.call.is_refined, self._stage_of(group)
        new = [id_ for id_ in group.ids if self._images[id_].has_refined_text != is_refined]
        rows, variant = 0, group.call.variant
        together: list[tuple[ImageTensors, Conditioning, int]] = []
        for id_ in new:
            image, count = self._images[id_], self._flights[id_].rows
            if rows + count > self.limits.buckets[-1]:
                stage.begin(together, self.limits.bucket(rows), variant)
                rows, together = 0, []
            rows += count
            tensors = image.tensors or image.begin(self.engines)
            together.append((tensors, image.text(is_refined=is_refined), count))
            image.has_refined_text = is_refined
        if together:
            stage.begin(together, self.limits.bucket(rows), variant)

    def _stage_of(self, group: Group) -> Stage:
        if not group.call.is_refined:
            return self._stage
        assert self.refiner is not None
        return self.refiner

    def _control(self, group: Group) -> bool:
        flights = [self._flights[id_] for id_ in group.ids]
        windows = [f.windows[place] for f, place in zip(flights, group.places, strict=True)]
        members = tuple(
            Member(self._tensors(f.id), is_guided=w.rows(f.next_step.rows) == 2)
            for f, w in zip(flights, windows, strict=True)
        )
        layout = Layout(group.call.axes, group.bucket, members)
        rows = torch.from_numpy(self._coefficients(flights))
        return self._stage.control(layout, rows, group.places)

    def _coefficients(self, flights: Sequence[Flight]) -> Any:
        """The scheduler's line of each image's next step."""
        tables = (self._images[f.id].request.table for f in flights)
        return np.array([t.rows[f.step] for t, f in zip(tables, flights, strict=True)], np.float32)

    def _step(self, group: Group) -> bool:
        flights = [self._flights[id_] for id_ in group.ids]
        images = [self._images[id_] for id_ in group.ids]
        rows = self._coefficients(flights)
        members = tuple(
            Member(self._tensors(f.id), f.next_step.is_guided, f.image_places) for f in flights
        )
        call = group.call
        layout = Layout(call.axes, group.bucket, members, call.variant, call.is_refined)
        noise = [
            image.noise.next() if is_noisy else None
            for image, is_noisy in zip(images, rows[:, NOISE] != 0, strict=True)
        ]
        stage = self._stage_of(group)
        is_usual = stage.step(group.network, layout, torch.from_numpy(rows), noise)
        for image, flight in zip(images, flights, strict=True):
            if image.kept is not None:
                # The masked part stays.
                tensors, table = self._tensors(flight.id), image.request.table
                image.kept.restore(tensors.picture(tensors.latents), table, flight.step + 1)
        return is_usual

    def _settle(self, calls_ahead: int, events: list[Event]) -> None:
        """Wait for calls beyond `calls_ahead`, observe their cost, return finished images."""
        while len(self._launched) > calls_ahead:
            launch = self._launched.popleft()
            self.call = launch.group, self.clock()
            launch.end.wait()
            self.call, ended = None, self.clock()
            seconds = launch.end.seconds_since(launch.start)
            if seconds is None:
                seconds = ended - max(launch.began_s, self.settled_s)
            between_s = max(ended - max(self.settled_s, self._busy_from_s) - seconds, 0.0)
            self.costs.observe(launch.group, seconds, between_s, is_usual=launch.is_usual)
            self.settled_s = ended
            for id_ in launch.ends:
                if id_ in self._images:
                    tensors = self._tensors(id_)
                    events.append(Finished(id_, tensors.picture(tensors.latents)))
                    self._drop(id_)

    # -- state ------------------------------------------------------------------------------

    def _flight(self, request: Request) -> Flight:
        return Flight(
            self.new_id(),
            self._axes(request),
            request.plan,
            priority=request.priority,
            deadline_s=request.deadline_s,
            client=request.client,
            weight=request.weight,
            variant=request.variant,
            windows=request.windows,
            image_windows=request.image_windows,
            rides=self.limits.rides,
        )

    def _axes(self, request: Request) -> Axes:
        tokens = request.conditioning.tokens
        return self.engines.axes(request.latent_h, request.latent_w, tokens, request.variant)

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
        if image is not None and image.tensors is not None:
            image.tensors.release()

    def _tensors(self, id_: int) -> ImageTensors:
        tensors = self._images[id_].tensors
        assert tensors is not None
        return tensors
