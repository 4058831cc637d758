"""Records a reference's calls and repeats them on other engines. Each call starts from the
reference's input, so errors do not add up.

It does not know which engines are compared, nor the bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engines.parity.findings import relative_norm
from sdxl.engine import Engine, Engines, call, torch_dtype
from sdxl.schedulers import COLUMNS, Table
from sdxl.specs import ModelSpec

NOISE = "noise"


@dataclass(frozen=True)
class EngineCall:
    """An engine's inputs and outputs. Of a UNet's outputs only the noise, without caches."""

    network: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @property
    def rows(self) -> int:
        return len(next(iter(self.inputs.values())))

    def tiled(self, rows: int) -> EngineCall:
        """Repeat the rows up to this number."""
        order = torch.arange(rows) % self.rows
        inputs, outputs = (
            {name: value[order] for name, value in tensors.items()}
            for tensors in (self.inputs, self.outputs)
        )
        return EngineCall(self.network, inputs, outputs)

    def on(self, engines: Engines) -> dict[str, Tensor]:
        """Return the inputs on these engines' device, in their types and layout."""
        dtypes = {t.name: torch_dtype(t) for t in engines[self.network].spec.inputs}
        return {n: v.to(engines.device, dtypes[n]).contiguous() for n, v in self.inputs.items()}


@dataclass
class CallRecorder:
    """An engine that records its calls."""

    engine: Engine
    calls: list[EngineCall]
    copies: dict[str, Tensor] = field(default_factory=dict)

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        input_copies = {name: self._copy(name, value) for name, value in inputs.items()}
        self.engine(inputs, outputs)
        names = [NOISE] if NOISE in outputs else list(outputs)
        output_copies = {name: outputs[name].cpu().clone() for name in names}
        self.calls.append(EngineCall(self.spec.name, input_copies, output_copies))

    def _copy(self, name: str, value: Tensor) -> Tensor:
        """Copy a tensor. An unchanged tensor, such as a prompt's keys and values, shares the last
        copy."""
        host = value.cpu()
        copy = self.copies.get(name)
        if copy is None or copy.shape != host.shape or not torch.equal(copy, host):
            copy = self.copies[name] = host.clone()
        return copy


def record_calls(engines: Engines, *names: str) -> tuple[Engines, list[EngineCall]]:
    """Return engines that record the calls of these networks, and the list of calls."""
    calls: list[EngineCall] = []
    copies: dict[str, Tensor] = {}
    by_name = {
        name: CallRecorder(engine, calls, copies) if name in names else engine
        for name, engine in engines.by_name.items()
    }
    return replace(engines, by_name=by_name), calls


def call_errors(engines: Engines, calls: Sequence[EngineCall]) -> list[float]:
    """Return the relative L2 of each call's worst output."""
    return [
        worst(relative_norm(found[name], expected) for name, expected in each.outputs.items())
        for each, found in _repeat(engines, calls)
    ]


@dataclass(frozen=True)
class StepError:
    """The relative L2 of a UNet's call, of the finished latents that the noise implies and of the
    noise. Wrong noise hardly changes a nearly finished picture."""

    network: str
    picture: float
    noise: float


def step_errors(engines: Engines, calls: Sequence[EngineCall], table: Table) -> list[StepError]:
    return [
        StepError(
            each.network,
            relative_norm(
                finished_latents(each.inputs, found[NOISE], table),
                finished_latents(each.inputs, each.outputs[NOISE], table),
            ),
            relative_norm(found[NOISE], each.outputs[NOISE]),
        )
        for each, found in _repeat(engines, calls)
    ]


def finished_latents(inputs: Mapping[str, Tensor], noise: Tensor, table: Table) -> Tensor:
    """Return the finished latents that each row's noise implies, by the scheduler's
    coefficients."""
    rows = torch.from_numpy(table.rows)
    distances = rows[:, COLUMNS.index("timestep")] - inputs["timestep"].double()[:, None]
    nearest = rows[distances.abs().argmin(1)]
    scale, signal, level = (nearest[:, COLUMNS.index(c)].view(-1, 1, 1, 1) for c in "sef")
    # An inpainting model's other channels come after the latents.
    latents = inputs["sample"][:, : noise.shape[1]]
    return signal / scale * latents.double() + level * noise.double()


def _repeat(
    engines: Engines, calls: Iterable[EngineCall]
) -> Iterator[tuple[EngineCall, dict[str, Tensor]]]:
    """Repeat each call on these engines; yield the call and the engines' outputs."""
    for each in calls:
        with engines.on_stream():
            found = call(engines[each.network], engines.arch, each.on(engines))
            engines.fence().wait()
        yield each, {name: value.float().cpu() for name, value in found.items()}


def worst(errors: Iterable[float]) -> float:
    """Return the largest error. Python's max would skip a NaN."""
    return float(torch.tensor([0.0, *errors]).max())
