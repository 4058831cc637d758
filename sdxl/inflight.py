"""The denoising loop: images join, run, pause and leave at any tick, and share UNet calls.

`tick` asks the policy for groups, makes one engine call per group, and takes one scheduler step for
each image in a group. A single picture, a service and the offline job use the same loop. It has no
thread and no clock, and knows no pictures and no HTTP; its results are latents.
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

NOISE = schedulers.COLUMNS.index("d")


class DeadlineExceeded(RuntimeError):
    """An admitted image missed its deadline."""


@dataclass(frozen=True)
class Request:
    """One image to denoise."""

    conditioning: Conditioning
    table: schedulers.Table
    plan: StepPlan
    guidance: float
    seed: int
    latent_h: int
    latent_w: int
    priority: Priority = Priority.INTERACTIVE
    deadline_s: float = math.inf
    """time on the loop's clock by which the picture must be ready"""
    source: SourceLatents | None = None
    """start instead of noise; the table must start at the same step"""
    controls: tuple[ControlInput, ...] = ()
    """sorted by net"""
    variation: Variation | None = None
    """variation of the noise"""

    def __post_init__(self) -> None:
        if self.plan.room[0] > self.conditioning.rows:
            raise ValueError("a guided step needs a negative prompt in the conditioning")
        if self.plan.refined_from is not None and self.conditioning.refined is None:
            raise ValueError("a refined step needs the refiner's conditioning")

    @property
    def variant(self) -> Variant:
        """The variant of its calls, without image prompts."""
        return self.conditioning.adapters.variant._replace(is_controlled=bool(self.controls))

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
    """None before the first step"""
    has_refined_text: bool | None = None
    """True if the text is the refiner's; None before the first step"""
    kept: KeptPart | None = None

    def conditioning(self, *, is_refined: bool) -> Conditioning:
        """Return the conditioning of the model, or of its refiner."""
        conditioning = self.request.conditioning
        if not is_refined:
            return conditioning
        assert conditioning.refined is not None
        return conditioning.refined

    def begin(self, engines: Engines) -> ImageTensors:
        request, source, masked = self.request, self.request.source, None
        if source is None:
            latents = self.noise.start() * request.table.start
        else:
            latents, self.kept, masked = begin(source, request.table, self.noise, engines.device)
        rows = request.plan.room[0]
        self.tensors = ImageTensors(
            latents.to(engines.device),
            request.guidance,
            masked,
            engines.slot(request.latent_h, request.latent_w, request.variant),
            request.conditioning.adapters.unet,
            [ControlState(each, request.conditioning, rows) for each in request.controls],
            [stacked_by_width(each.text) for each in request.conditioning.images],
        )
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
    """False for a first call, whose time includes compiling or recording"""


@dataclass
class InFlight:
    """The loop of one device. `limits` may be replaced between ticks."""

    engines: Engines
    clock: Callable[[], float]
    limits: Limits
    costs: Costs = field(default_factory=Costs)
    stage: Stage | None = None
    """the UNet's stage, which loops that run in turn may share"""
    refiner: Stage | None = None
    """the refiner's stage"""

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
        """the current engine call and its start; other threads read it"""

    # -- commands ---------------------------------------------------------------------------

    def submit(self, request: Request, admitted: Flight | None = None) -> int:
        """Accept an image, or raise Refused (admission.py). `admitted`: it was accepted before."""
        height, width, tokens = request.latent_h, request.latent_w, request.conditioning.tokens
        facts: dict[str, Any] = {
            "axes": self.engines.axes(height, width, tokens, request.variant),
            "variant": request.variant,
            "windows": request.windows,
            "image_windows": request.image_windows,
            "rides": self.limits.rides,
        }
        if admitted is None:
            newcomer = Flight(
                self.new_id(),
                plan=request.plan,
                priority=request.priority,
                deadline_s=request.deadline_s,
                **facts,
            )
            admitted = self.admission().admit(newcomer, self.time)
        if self.is_idle:
            self._busy_from_s = self.clock()
        # A flight that was admitted before its files were loaded has only predictions of these.
        flight = self._flights[admitted.id] = admitted.changed(**facts)
        shape = self.engines.arch.latent_channels, height, width
        noise = NoiseSource(request.seed, shape, request.variation)
        self._images[flight.id] = _Image(request, noise)
        return flight.id

    def new_id(self) -> int:
        """Return the id of an image to be submitted."""
        return next(self._ids)

    def cancel(self, id_: int) -> None:
        """Drop an image before the next tick. An unknown or finished id is ignored."""
        self._drop(id_)

    # -- queries ----------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True if no image is in flight and no call is running."""
        return not self._flights and not self._launched

    @property
    def flights(self) -> tuple[Flight, ...]:
        """The unfinished images in order of arrival."""
        return tuple(f for f in self._flights.values() if not f.is_done)

    def admission(self) -> Admission:
        return Admission(self.flights, self.limits, self.costs, self.clock())

    def finish_times(self) -> dict[int, float]:
        """Predict from measured costs when each image will be ready, on the loop's clock."""
        return project(self.flights, self.limits, self.costs, self.clock())

    def preview(self, id_: int) -> Tensor | None:
        """Return the latents of the picture that the model expects; None before its first step."""
        image = self._images.get(id_)
        if image is None or image.tensors is None or self._flights[id_].step == 0:
            return None
        with self.engines.on_stream():
            return image.tensors.picture(image.tensors.estimate).clone()

    # -- the loop ---------------------------------------------------------------------------

    def tick(self) -> list[Event]:
        """Take one step of every runnable image; return the finished and failed images."""
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
        """Tick until no image is left."""
        events: list[Event] = []
        while self._flights or self._launched:
            events += self.tick()
        return events

    def _launch(self, group: Group, whole: Group, events: list[Event]) -> None:
        """Launch the UNet's call of `group`, or a call of one of its ControlNets; `whole` is then
        the group of the UNet's call."""
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
            # All images of the call fail; other images continue.
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
        """Return the group without images that have failed meanwhile."""
        is_left = [id_ in self._flights for id_ in group.ids]
        ids, places = (tuple(compress(each, is_left)) for each in (group.ids, group.places))
        return replace(group, ids=ids, places=places)

    def _begin(self, group: Group) -> None:
        """Compute the text of the group's images that begin or switch to the refiner."""
        is_refined, stage = group.call.is_refined, self._stage_of(group)
        new = [id_ for id_ in group.ids if self._images[id_].has_refined_text != is_refined]
        rows, variant = 0, group.call.variant
        batch: list[tuple[ImageTensors, Conditioning, int]] = []
        for id_ in new:
            image, count = self._images[id_], self._flights[id_].rows
            if rows + count > self.limits.buckets[-1]:
                stage.begin(batch, self.limits.bucket(rows), variant)
                rows, batch = 0, []
            rows += count
            tensors = image.tensors or image.begin(self.engines)
            batch.append((tensors, image.conditioning(is_refined=is_refined), count))
            image.has_refined_text = is_refined
        if batch:
            stage.begin(batch, self.limits.bucket(rows), variant)

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
        """Return the line of the scheduler's table for each image's next step."""
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
                # Restore the part of an edit's source that does not change.
                tensors, table = self._tensors(flight.id), image.request.table
                image.kept.restore(tensors.picture(tensors.latents), table, flight.step + 1)
        return is_usual

    def _settle(self, calls_ahead: int, events: list[Event]) -> None:
        """Wait until at most `calls_ahead` calls are running. Learn the costs of the others and
        append their finished images to `events`."""
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
