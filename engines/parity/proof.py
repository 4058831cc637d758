"""Compares built engines with the model in PyTorch: every network in every profile, and whole
pictures. Also measures the time of calls, and memory. Engines and model are never in memory at the
same time. It knows no TensorRT.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engines.folders.profiles import Profile, choose
from engines.parity.calls import EngineCall, call_errors, record_calls
from engines.parity.findings import (
    PLAN_PICTURE_BOUNDS,
    CheckFailed,
    Finding,
    broken,
    picture_findings,
    plan_bound,
)
from engines.parity.pictures import Subject, paint
from sdxl.checkpoint import Checkpoint
from sdxl.engine import Engines, call, torch_dtype
from sdxl.specs import IMAGE_COUNTS, IMAGE_TOKENS, VAE, ModelSpec, level_axes, plain_name

DECODER, ENCODER = VAE
INTERVALS = (1, 2)
WARM_CALLS, TIMED_CALLS = 2, 5
Profiles = Mapping[str, Sequence[Profile]]


@dataclass(frozen=True)
class Proof:
    """The findings of a run, or why the engines did not run."""

    parity: Mapping[str, Any]
    costs: Mapping[str, Any] = field(default_factory=dict)
    """seconds of a call at the model's own size, by network and rows"""
    device_bytes: int = 0
    """the engines' memory after these calls"""


def not_run(why: str) -> Proof:
    return Proof({"findings": [], "note": f"not run: {why}"})


@dataclass(frozen=True)
class ReferenceCalls:
    """The model's calls, at its usual and the smallest size, and its pictures by interval."""

    usual: Mapping[str, EngineCall]
    small: Mapping[str, EngineCall]
    pictures: Mapping[int, Tensor]


@dataclass(frozen=True)
class PlanTrial:
    """A comparison: the subject, and how both sides are loaded. `used_bytes` returns the device's
    memory in use."""

    checkpoint: Checkpoint
    subject: Subject
    precision: str
    load_reference: Callable[[], Engines]
    load_built: Callable[[], Engines]
    profiles: Profiles
    used_bytes: Callable[[], int] = lambda: 0
    say: Callable[[str], None] = print

    def run(self) -> Proof:
        """Compare; raise CheckFailed if a figure is outside its bound."""
        reference = self.reference()
        before = self.used_bytes()
        engines = self.load_built()
        findings = []
        for finding in (*self.calls(engines, reference), *self.pictures(engines, reference)):
            self.say(finding.line)
            findings.append(finding)
        if wrong := broken(findings):
            raise CheckFailed(f"built engines are not the model: {wrong}")
        costs = {name: _costs(engines, each) for name, each in reference.usual.items()}
        held = self.used_bytes() - before
        parity = {
            "findings": [asdict(f) for f in findings],
            "note": "",
            "painted": {**self.subject.painted, "intervals": list(INTERVALS)},
        }
        return Proof(parity, costs, held)

    def reference(self) -> ReferenceCalls:
        engines = self.load_reference()
        smallest_latents, _, _ = self.profiles[DECODER][-1].ranges["latents"]
        smallest_side = smallest_latents[-1] * engines.arch.vae_scale
        usual, small = (self._first_calls(engines, side) for side in (None, smallest_side))
        return ReferenceCalls(usual, small, {n: self._paint(engines, n) for n in INTERVALS})

    def calls(self, engines: Engines, reference: ReferenceCalls) -> Iterator[Finding]:
        for name, profiles in self.profiles.items():
            spec, bound = engines[name].spec, plan_bound(plain_name(name), self.precision)
            for index in range(len(profiles)):
                reference_call = _call_in_profile(spec, profiles, index, reference)
                (error,) = call_errors(engines, [reference_call])
                shape = "×".join(map(str, next(iter(reference_call.inputs.values())).shape))
                what = f"{name}, profile {index + 1} of {len(profiles)}, {shape}"
                yield Finding(f"{what}, relative L2", error, bound)

    def pictures(self, engines: Engines, reference: ReferenceCalls) -> Iterator[Finding]:
        for interval, expected in reference.pictures.items():
            found = self._paint(engines, interval)
            bound, course = PLAN_PICTURE_BOUNDS[self.precision], f", interval {interval}"
            yield from picture_findings(found, expected, bound, self.subject.steps, course)

    def _paint(self, engines: Engines, interval: int) -> Tensor:
        count = self.subject.compared
        return paint(self.checkpoint, engines, self.subject, count, interval)

    def _first_calls(self, engines: Engines, side: int | None) -> dict[str, EngineCall]:
        """Record each network's first call in a picture of two steps."""
        recorder, calls = record_calls(engines, *engines.by_name)
        paint(self.checkpoint, recorder, replace(self.subject, steps=2, side=side), 1, interval=2)
        first = {each.network: each for each in reversed(calls)}
        if ENCODER in engines.by_name:
            # Painting from text does not call the encoder, so encode the decoded picture.
            image = EngineCall(ENCODER, first[DECODER].outputs, {}).on(engines)
            call(recorder[ENCODER], engines.arch, image)
            first[ENCODER] = calls[-1]
        return first


def _call_in_profile(
    spec: ModelSpec, profiles: Sequence[Profile], index: int, reference: ReferenceCalls
) -> EngineCall:
    """Return a call for which this profile is the first that fits."""
    name = plain_name(spec.name)
    first = next(iter(reference.usual[name].inputs))
    low, usual, _ = profiles[index].ranges[first]
    for rows, calls in (
        (usual[0], reference.usual),
        (low[0], reference.usual),
        (low[0], reference.small),
        (usual[0], reference.small),
    ):
        example = _add_empty_inputs(spec, calls[name].tiled(rows))
        shapes = {n: tuple(v.shape) for n, v in example.inputs.items()}
        # A bank is no input of the example.
        without_bank = [Profile({n: p.ranges[n] for n in shapes}) for p in profiles]
        fits = any(profile.admits(shapes) for profile in without_bank)
        if fits and choose(spec.name, without_bank, shapes) == index:
            return example
    raise CheckFailed(f"{spec.name}: no call of the model meets profile {index + 1}; build again")


def _add_empty_inputs(spec: ModelSpec, plain: EngineCall) -> EngineCall:
    """Return a plain network's call as a call of the network with LoRAs, residuals or image
    prompts. The inputs that it lacks are zeros, which add nothing."""
    sizes = {"pages": 1, "images": IMAGE_COUNTS[0], "image_tokens": IMAGE_TOKENS[0]}
    for tensor in spec.inputs:
        if tensor.name in plain.inputs:
            shape = plain.inputs[tensor.name].shape
            sizes |= {axis: shape[place] for place, axis in tensor.free_axes.items()}
    if "latent_h" in sizes:
        sizes |= level_axes(sizes["latent_h"], sizes["latent_w"])
    inputs = {
        t.name: plain.inputs[t.name]
        if t.name in plain.inputs
        else torch.zeros(t.shape(sizes), dtype=torch_dtype(t))
        for t in spec.inputs
    }
    return EngineCall(spec.name, inputs, plain.outputs)


def _costs(engines: Engines, example: EngineCall) -> dict[str, float]:
    is_unet = example.network.startswith("unet_") and example.network != "unet_prompt"
    counts = engines.buckets if is_unet else (example.rows,)
    return {str(rows): _seconds(engines, example.tiled(rows)) for rows in counts}


def _seconds(engines: Engines, example: EngineCall) -> float:
    """Return the median time of a few calls, after warm-up."""
    inputs, engine, times = example.on(engines), engines[example.network], []
    for _ in range(WARM_CALLS + TIMED_CALLS):
        with engines.on_stream():
            engines.fence().wait()
            start = time.perf_counter()
            call(engine, engines.arch, inputs)
            engines.fence().wait()
            times.append(time.perf_counter() - start)
    return round(statistics.median(times[WARM_CALLS:]), 6)


def used_on_gpu() -> int:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free
