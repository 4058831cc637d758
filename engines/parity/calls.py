"""Records a reference's calls and repeats them on other engines: each call then starts from the
same input, and errors do not add up.

It does not know what the engines are, nor which figure is good enough.
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
    """An engine's inputs and outputs; of a UNet's only the noise, without caches."""

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
        """The inputs in these engines' device, types and layout."""
        dtypes = {t.name: torch_dtype(t) for t in engines[self.network].spec.inputs}
        return {n: v.to(engines.device, dtypes[n]).contiguous() for n, v in self.inputs.items()}


@dataclass
class CallRecorder:
    """An engine that records its calls."""

    engine: Engine
    calls: list[EngineCall]
    kept: dict[str, Tensor] = field(default_factory=dict)

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    def __call__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        given = {name: self._kept(name, value) for name, value in inputs.items()}
        self.engine(inputs, outputs)
        names = [NOISE] if NOISE in outputs else list(outputs)
        made = {name: outputs[name].cpu().clone() for name in names}
        self.calls.append(EngineCall(self.spec.name, given, made))

    def _kept(self, name: str, value: Tensor) -> Tensor:
        """Copy a tensor; share the copy if it is unchanged, as a prompt's keys and values are."""
        host = value.cpu()
        old = self.kept.get(name)
        if old is None or old.shape != host.shape or not torch.equal(old, host):
            old = self.kept[name] = host.clone()
        return old


def listening(engines: Engines, *names: str) -> tuple[Engines, list[EngineCall]]:
    """Return engines that record the calls of these networks, and the list of calls."""
    calls: list[EngineCall] = []
    kept: dict[str, Tensor] = {}
    by_name = {
        name: CallRecorder(engine, calls, kept) if name in names else engine
        for name, engine in engines.by_name.items()
    }
    return replace(engines, by_name=by_name), calls


def call_errors(engines: Engines, calls: Sequence[EngineCall]) -> list[float]:
    """The relative L2 of each call's worst output."""
    return [
        worst(relative_norm(found[name], expected) for name, expected in each.outputs.items())
        for each, found in answers(engines, calls)
    ]


@dataclass(frozen=True)
class StepError:
    """The relative L2 of a UNet's call: of the finished latents that it expects, and of its noise
    alone. Noise in a nearly finished picture hardly changes the picture, however wrong it is."""

    network: str
    picture: float
    noise: float


def step_errors(engines: Engines, calls: Sequence[EngineCall], table: Table) -> list[StepError]:
    return [
        StepError(
            each.network,
            relative_norm(
                finished(each.inputs, found[NOISE], table),
                finished(each.inputs, each.outputs[NOISE], table),
            ),
            relative_norm(found[NOISE], each.outputs[NOISE]),
        )
        for each, found in answers(engines, calls)
    ]


def finished(inputs: Mapping[str, Tensor], noise: Tensor, table: Table) -> Tensor:
    """The finished latents that each row's noise implies, by the scheduler's coefficients."""
    rows = torch.from_numpy(table.rows)
    far = rows[:, COLUMNS.index("timestep")] - inputs["timestep"].double()[:, None]
    own = rows[far.abs().argmin(1)]
    scale, signal, level = (own[:, COLUMNS.index(c)].view(-1, 1, 1, 1) for c in "sef")
    # An inpainting model's other channels come after the latents.
    latents = inputs["sample"][:, : noise.shape[1]]
    return signal / scale * latents.double() + level * noise.double()


def answers(
    engines: Engines, calls: Iterable[EngineCall]
) -> Iterator[tuple[EngineCall, dict[str, Tensor]]]:
    """Repeat each call on these engines and yield their outputs."""
    for each in calls:
        with engines.on_stream():
            found = call(engines[each.network], engines.arch, each.on(engines))
            engines.fence().wait()
        yield each, {name: value.float().cpu() for name, value in found.items()}


def worst(errors: Iterable[float]) -> float:
    """The largest error; Python's max would skip a NaN."""
    return float(torch.tensor([0.0, *errors]).max())
