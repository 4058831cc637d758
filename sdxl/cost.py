"""Measured costs of calls, and predictions from them: the knee, and when each picture is ready.

Costs are learned from the calls of the loop. `project` runs the policy forward over plain data with
these costs, so an estimate includes every queue, bucket and step plan. It knows no engines and no
clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sdxl.controls import Window
from sdxl.flight import PLAIN, CallKey, Flight, Network, State
from sdxl.image_prompts import ImageWindow
from sdxl.policy import Group, Limits, foremost, groups_of, plan_tick, stepping

SMOOTHING = 0.2
"""Share of a new measurement in the running mean. An outlier counts at most twice the mean, the
first one at most twice the estimate."""
KNEE_TOLERANCE = 0.03
"""A bucket is on the knee if its cost per row is within this share of the best."""
SHALLOW_SHARE, CONTROL_SHARE = 0.034, 0.45
NETWORK_SHARES: Mapping[Network, float] = {
    "unet_deep": 1.0,
    "unet_shallow": SHALLOW_SHARE,
    "control_deep": CONTROL_SHARE,
}
"""Assumed cost of a call relative to a deep one, until it is measured."""
VARIANT_SHARES: Mapping[str, float] = {"": 1.0, "lora": 1.3, "locon": 1.8}
"""Assumed cost of a call with LoRAs relative to a plain one, until it is measured."""
MOST_TICKS = 1000
"""The most costs kept: each picture size adds some, and each estimate reads all."""
MEASURED = ("between_s", "encode_s", "image_s", "decode_s", "paste_s")
"""Costs other than UNet calls."""
NETWORKS: tuple[Network, Network] = ("unet_deep", "unet_shallow")
"""The UNet's networks."""


class CostKey(NamedTuple):
    call: CallKey
    bucket: int

    @property
    def kind(self) -> tuple[Network, str, bool, str]:
        """What matters more to its cost than its size."""
        return self.call.network, self.call.net, self.call.is_refined, self.call.variant.name

    @property
    def size(self) -> int:
        """Pixels of the latents of all rows."""
        axes = dict(self.call.axes)
        return self.bucket * axes["latent_h"] * axes["latent_w"]


@dataclass
class Costs:
    """Seconds of UNet calls by call key and bucket, and of encoding and decoding."""

    ticks: dict[CostKey, float] = field(default_factory=dict)
    between_s: float = 0.0
    """from the end of a call to the start of the next one: planning, first steps, ETAs"""
    encode_s: float = 0.0
    """to encode the prompts of one picture"""
    image_s: float = 0.0
    """to encode an edit's image of the model's own size"""
    decode_s: float = 0.0
    """from final latents to a file, at the model's own size"""
    paste_s: float = 0.0
    """to paste a result into an image with as many pixels as the model's own size, and to write the
    file; 0: unknown, `decode_s` is assumed"""
    pasting_s: float = 0.0
    """predicted seconds of pasting left for pictures whose steps are done"""
    lasting: frozenset[CostKey] = frozenset()
    """costs from the warm-up, which are never dropped"""

    def observe(
        self, group: Group, seconds: float, between_s: float = 0.0, *, is_usual: bool = True
    ) -> None:
        """Learn from a call and the time before it; the time of a first run is ignored."""
        if not is_usual:
            return
        self.between_s = smoothed(self.between_s or None, between_s)
        key = CostKey(group.call, group.bucket)
        mean_s = self.ticks.get(key)
        if mean_s is None:
            similar = self._nearest(key)
            if similar is not None and similar[0].kind == key.kind:
                seconds = min(seconds, 2 * self._estimate(key))
        self.ticks[key] = smoothed(mean_s, seconds)
        if len(self.ticks) > MOST_TICKS:
            # Drop the oldest; the next such call measures it again.
            oldest = next((each for each in self.ticks if each not in self.lasting), key)
            del self.ticks[oldest]

    def tick_s(self, group: Group) -> float:
        """Return the seconds of a group's call and of its ControlNets' calls."""
        return self.call_s(group) + sum(map(self.call_s, group.nets))

    def call_s(self, group: Group) -> float:
        """Return the seconds of a call and of the time before it."""
        return self.between_s + self.device_s(CostKey(group.call, group.bucket))

    def device_s(self, key: CostKey) -> float:
        """Return a call's measured seconds, or an estimate from the most similar measured call."""
        known = self.ticks.get(key)
        return known if known is not None else self._estimate(key)

    def _estimate(self, key: CostKey) -> float:
        similar = self._nearest(key)
        if similar is None:
            return 0.0
        nearest, seconds = similar
        ratio = key.size / nearest.size
        ratio *= VARIANT_SHARES[key.call.variant.name] / VARIANT_SHARES[nearest.call.variant.name]
        ratio *= NETWORK_SHARES[key.call.network] / NETWORK_SHARES[nearest.call.network]
        return seconds * ratio

    def _nearest(self, key: CostKey) -> tuple[CostKey, float] | None:
        """Return the measured call with the fewest differences in kind, then in size."""

        def distance(measured: tuple[CostKey, float]) -> tuple[list[bool], float]:
            other, _ = measured
            differs = [a != b for a, b in zip(key.kind, other.kind, strict=True)]
            return differs, abs(math.log(other.size / key.size))

        # A copy, because the loop's thread may change the costs meanwhile.
        return min(self.ticks.copy().items(), key=distance, default=None)

    def knee(self, image: Flight, buckets: Sequence[int], tolerance: float = KNEE_TOLERANCE) -> int:
        """Return the smallest bucket whose measured cost per row is near the best. More rows would
        slow each other down and finish no sooner."""
        per_row = {
            bucket: seconds / bucket
            for bucket in buckets
            if (seconds := self.ticks.get(CostKey(image.call("unet_deep"), bucket))) is not None
        }
        if not per_row:
            return buckets[-1]
        best = min(per_row.values())
        return min(b for b, cost in per_row.items() if cost <= best * (1 + tolerance))

    def knees(self, limits: Limits, image: Flight) -> Limits:
        """Return the limits with the best numbers of rows; a guided image needs two."""
        calls = (self.tick_s(Group(image.call("unet_deep"), (), b)) for b in limits.buckets)
        return replace(
            limits,
            rows=max(self.knee(image, limits.buckets), 2),
            crowded_rows=self.knee(image, limits.buckets, tolerance=0.0),
            standard=image,
            call_s=tuple(calls),
        )

    def row_at_most_s(self, call: CallKey, limits: Limits) -> float:
        """Return the largest cost of a row of this call in any bucket; infinite unless all buckets
        are measured. A bucket has at least one row more than the next smaller bucket's size."""
        fewest = (1, *(bucket + 1 for bucket in limits.buckets))
        return max(
            (self.ticks.get(CostKey(call, bucket), math.inf) + self.between_s) / rows
            for rows, bucket in zip(fewest, limits.buckets, strict=False)
        )

    def work_s(self, flight: Flight, limits: Limits) -> float:
        """Return the device's seconds for an image: its steps in full calls, and other work."""
        bucket = limits.bucket(min(limits.rows, limits.buckets[-1]))
        leg_s = 0.0
        for network, is_refined in itertools.product(NETWORKS, (False, True)):
            rows = flight.plan.rows(is_deep=network == "unet_deep", is_refined=is_refined)
            if rows:
                call = flight.call(network)
                call = CallKey(network, flight.axes, is_refined=True) if is_refined else call
                leg_s += self.tick_s(Group(call, (), bucket)) * rows / bucket
        leg_s += sum(self._net_s(window, flight, bucket) for window in flight.windows)
        later = flight.later
        if later is None:
            return leg_s + self.pasted_s(flight)
        return leg_s + later.delay_s + self.work_s(flight.next_leg, limits)

    def _net_s(self, window: Window, flight: Flight, bucket: int) -> float:
        """Return the seconds of a ControlNet's calls in full calls."""
        rows = flight.plan.rows_in(window)
        call = CallKey("control_deep", flight.axes, net=window.net)
        return self.call_s(Group(call, (), bucket)) * rows / bucket

    def decoded_s(self, flight: Flight, limits: Limits) -> float:
        """Return the seconds from an image's final latents to its file."""
        return self.decode_s * (size_of(flight) / size_of(limits.standard or flight))

    def pasted_s(self, flight: Flight) -> float:
        """Return the seconds to paste an image's result."""
        return (self.paste_s or self.decode_s) * flight.pasted

    def as_dict(self) -> dict[str, Any]:
        ticks = [
            {**call._asdict(), "axes": dict(call.axes), "bucket": bucket, "seconds": seconds}
            for (call, bucket), seconds in self.ticks.items()
        ]
        others = {name: getattr(self, name) for name in MEASURED}
        return {"ticks": ticks, **others}


def size_of(flight: Flight) -> int:
    """Return the pixels of an image's latents."""
    axes = dict(flight.axes)
    return axes["latent_h"] * axes["latent_w"]


def smoothed(mean: float | None, value: float) -> float:
    if mean is None:
        return value
    return mean + SMOOTHING * (min(value, 2 * mean) - mean)


def project(
    flights: Sequence[Flight],
    limits: Limits,
    costs: Costs,
    now: float,
    of: Collection[int] | None = None,
) -> dict[int, float]:
    """Predict when each picture will be ready if no more requests arrive; infinite for images that
    never run. `of`: stop once these are ready, which saves time with a long queue."""
    states = {f.id: f.changed(deadline_s=math.inf) for f in flights}
    delay_s = dict.fromkeys(states, 0.0)
    finish = {f.id: math.inf for f in flights}
    left, known = set(states if of is None else of), _Ticks()
    pasting_until = now + costs.pasting_s
    while left:
        near = foremost(states.values(), limits)
        plan = plan_tick(near, limits, now)
        if not plan.groups:
            break
        for id_ in (*plan.admitted, *plan.resumed):
            states[id_] = states[id_].changed(state=State.RUNNING)
        for id_ in plan.paused:
            states[id_] = states[id_].changed(state=State.PAUSED)
        running = [f for f in states.values() if f.state is State.RUNNING]
        seconds, steps = _stride(running, limits, costs, known, is_long=plan.is_settled)
        now += seconds
        for flight, taken in zip(running, steps, strict=True):
            moved = flight.advanced(taken)
            states[flight.id] = moved
            if moved.is_done and moved.later is not None:
                # Only this image waits; other images run meanwhile.
                delay_s[flight.id] = moved.later.delay_s
                states[flight.id] = moved.next_leg
            elif moved.is_done:
                ready = now + delay_s[flight.id] + costs.decoded_s(moved, limits)
                if moved.pasted:
                    ready = pasting_until = max(ready, pasting_until) + costs.pasted_s(moved)
                finish[flight.id] = ready
                left.discard(flight.id)
                del states[flight.id]
    return finish


def all_ready_s(flights: Sequence[Flight], limits: Limits, costs: Costs, now: float) -> float:
    """Return an upper bound of `project` for all flights in any order, in a twentieth of the time:
    each row counts with the largest possible cost. The bound is infinite if a cost is unknown, or
    an image has ControlNets, image prompts or a refiner, or has LoRAs and shares calls."""
    work_s, after_s, pasting_s = 0.0, 0.0, costs.pasting_s
    row_s: dict[CallKey, float] = {}
    for flight in flights:
        has_windows = flight.windows or flight.image_windows
        if has_windows or (flight.rides and flight.variant != PLAIN):
            # Rows with LoRAs make the calls that they share slower.
            return math.inf
        later = flight.later
        if any(leg.plan.refined_from is not None for leg in (flight, later) if leg):
            return math.inf
        pasting_s += costs.pasted_s(flight)
        delay_s = later.delay_s if later else 0.0
        for leg in (flight, flight.next_leg) if later else (flight,):
            deep, both = leg.plan.deep_rows_before, leg.plan.rows_before
            deep_rows = deep[-1] - deep[leg.step]
            shallow_rows = both[-1] - both[leg.step] - deep_rows
            for network, rows in zip(NETWORKS, (deep_rows, shallow_rows), strict=True):
                call = leg.call(network)
                if rows and call not in row_s:
                    row_s[call] = costs.row_at_most_s(call, limits)
                work_s += rows * row_s[call] if rows else 0.0
            after_s = max(after_s, delay_s + costs.decoded_s(leg, limits))
    return now + work_s + after_s + pasting_s


_Ticks = dict[tuple[object, ...], tuple[float, list[int]]]
"""Seconds of a tick and the steps that each image takes, by the pattern of all images' next steps
and next deep steps. Patterns repeat."""


def _stride(
    running: Sequence[Flight], limits: Limits, costs: Costs, known: _Ticks, *, is_long: bool
) -> tuple[float, list[int]]:
    """Return the seconds of the next tick, or with `is_long` of all ticks until one image needs
    less room, and the steps that each image takes."""
    at, ends = [f.step for f in running], [f.step + f.steady_ticks for f in running]
    facts = [((f.axes, f.variant, _windows(f)), f.plan) for f in running]
    seconds = 0.0
    while True:
        pattern = tuple(
            (
                *(key, plan[step], plan.to_deep[step], plan.deep_is_refined[step]),
                key[2] and _covering(key[2], step, len(plan)),
            )
            for (key, plan), step in zip(facts, at, strict=True)
        )
        if pattern not in known:
            known[pattern] = _tick(running, at, limits, costs)
        cost, steps = known[pattern]
        seconds += cost
        at = [step + taken for step, taken in zip(at, steps, strict=True)]
        if not is_long or any(step == end for step, end in zip(at, ends, strict=True)):
            return seconds, [step - f.step for f, step in zip(running, at, strict=True)]


def _windows(flight: Flight) -> Sequence[Window | ImageWindow]:
    return (*flight.windows, *flight.image_windows)


def _covering(windows: Sequence[Window | ImageWindow], step: int, steps: int) -> tuple[bool, ...]:
    return tuple(window.covers(step, steps) for window in windows)


def _tick(
    running: Sequence[Flight], at: Sequence[int], limits: Limits, costs: Costs
) -> tuple[float, list[int]]:
    """Return the seconds of the tick at these steps, and the step or none that each image takes."""
    flights = stepping([f.changed(step=step) for f, step in zip(running, at, strict=True)])
    ids = {f.id for f in flights}
    cost = sum(costs.tick_s(group) for group in groups_of(flights, limits))
    return cost, [int(f.id in ids) for f in running]
