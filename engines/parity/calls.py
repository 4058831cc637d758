"""A reference's calls while it paints, kept on the host and given to other engines: each call then
starts from the same input, and its error is its own.

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
    """What an engine was given, and what it made of it: a UNet's noise, without its caches."""

    network: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]

    @property
    def rows(self) -> int:
        return len(next(iter(self.inputs.values())))

    def tiled(self, rows: int) -> EngineCall:
        """The same rows again and again, so many."""
        order = torch.arange(rows) % self.rows
        inputs, outputs = (
            {name: value[order] for name, value in tensors.items()}
            for tensors in (self.inputs, self.outputs)
        )
        return EngineCall(self.network, inputs, outputs)

    def on(self, engines: Engines) -> dict[str, Tensor]:
        """Its inputs as these engines take them, however they lay where they were heard."""
        dtypes = {t.name: torch_dtype(t) for t in engines[self.network].spec.inputs}
        return {n: v.to(engines.device, dtypes[n]).contiguous() for n, v in self.inputs.items()}


@dataclass
class Listening:
    """An engine whose calls are kept."""

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
        """A copy; the same one where nothing changed, as the prompt's keys and values do not."""
        host = value.cpu()
        old = self.kept.get(name)
        if old is None or old.shape != host.shape or not torch.equal(old, host):
            old = self.kept[name] = host.clone()
        return old


def listening(engines: Engines, *names: str) -> tuple[Engines, list[EngineCall]]:
    """The same engines, and the list that the calls of these networks will be in."""
    calls: list[EngineCall] = []
    kept: dict[str, Tensor] = {}
    by_name = {
        name: Listening(engine, calls, kept) if name in names else engine
        for name, engine in engines.by_name.items()
    }
    return replace(engines, by_name=by_name), calls


def call_errors(engines: Engines, calls: Sequence[EngineCall]) -> list[float]:
    """The relative L2 of what comes out, call by call: of several outputs the worst."""
    return [
        worst(relative_norm(found[name], expected) for name, expected in each.outputs.items())
        for each, found in answers(engines, calls)
    ]


@dataclass(frozen=True)
class StepError:
    """Of a UNet's call, as relative L2: of the finished picture's latents as the call expects them
    then, and of the noise alone. What noise it finds in a nearly finished picture moves that by
    next to nothing, however wrong it is."""

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
    """By the scheduler's own coefficients, of every row by itself."""
    rows = torch.from_numpy(table.rows)
    far = rows[:, COLUMNS.index("timestep")] - inputs["timestep"].double()[:, None]
    own = rows[far.abs().argmin(1)]
    scale, signal, level = (own[:, COLUMNS.index(c)].view(-1, 1, 1, 1) for c in "sef")
    # Before what a model made for inpainting reads besides.
    latents = inputs["sample"][:, : noise.shape[1]]
    return signal / scale * latents.double() + level * noise.double()


def answers(
    engines: Engines, calls: Iterable[EngineCall]
) -> Iterator[tuple[EngineCall, dict[str, Tensor]]]:
    """What these engines make of the same inputs."""
    for each in calls:
        with engines.on_stream():
            found = call(engines[each.network], engines.arch, each.on(engines))
            engines.fence()()
        yield each, {name: value.float().cpu() for name, value in found.items()}


def worst(errors: Iterable[float]) -> float:
    """Python's max passes over what is no number."""
    return float(torch.tensor([0.0, *errors]).max())
