"""How far another backend's UNet is from float32's, step by step, on the very same inputs.

A picture is painted once; every UNet call's inputs and answer are kept, and given to the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sdxl.engine import Engine, Engines, call, torch_dtype
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline
from sdxl.specs import ModelSpec

UNETS = ("unet_deep", "unet_shallow")
MOST_DB = 100.0
"""of equal pictures, whose PSNR has no bound"""


@dataclass(frozen=True)
class Call:
    network: str
    inputs: dict[str, Tensor]
    noise: Tensor


@dataclass
class _Recorder:
    """An engine that keeps what it was given and what it said."""

    engine: Engine
    calls: list[Call] = field(default_factory=list)

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        kept = {name: value.clone() for name, value in inputs.items()}
        self.engine(inputs, outputs)
        self.calls.append(Call(self.spec.name, kept, outputs["noise"].clone()))


def recorded(pipeline: Pipeline, params: GenerationParams) -> list[Call]:
    """Every UNet call of a picture, in order."""
    calls: list[Call] = []
    watched = {name: _Recorder(pipeline.engines[name], calls) for name in UNETS}
    # A recording would be replayed, and the recorder not be called.
    engines = replace(
        pipeline.engines,
        by_name={**pipeline.engines.by_name, **watched},
        run_recorded=Engines.run_recorded,
    )
    (result,) = Pipeline(pipeline.checkpoint, engines).generate([params])
    if result.error:
        raise result.error
    return calls


def errors_by_step(reference: Pipeline, engines: Engines, params: GenerationParams) -> list[float]:
    """Relative L2 of the predicted noise, a number for each step."""
    return [relative_l2(answer(engines, each), each.noise) for each in recorded(reference, params)]


def answer(engines: Engines, each: Call) -> Tensor:
    engine = engines[each.network]
    inputs = {
        t.name: each.inputs[t.name].to(engines.device, torch_dtype(t)) for t in engine.spec.inputs
    }
    return call(engine, engines.arch, inputs)["noise"]


def relative_l2(found: Tensor, expected: Tensor) -> float:
    expected = expected.to(found.device).double()
    return float(torch.linalg.vector_norm(found.double() - expected) / expected.norm())


def psnr_db(found: Tensor, expected: Tensor) -> float:
    """Of float pictures in -1..1."""
    error = float((found.double() - expected.double()).div(2).square().mean())
    return MOST_DB if error == 0 else min(-10 * math.log10(error), MOST_DB)
