"""Runs ControlNets for images in flight: a call is one step of one net for all rows that it guides.

Images keep the residuals until their next deep step. Residuals of several nets are added up in the
order of the calls. This module imports no policy and reads no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sdxl.conditioning import Conditioning
from sdxl.control_inputs import ControlInput
from sdxl.engine import Engines, call, torch_dtype
from sdxl.layout import Layout, Tables, scaled_sample
from sdxl.specs import RESIDUAL, ROWS, TensorSpec
from sdxl.static_memory import StaticMemory

HINT = "control_hint"
_numbers = itertools.count()


@dataclass(eq=False)
class ControlState:
    """One ControlNet of an image in flight."""

    given: ControlInput
    conditioning: Conditioning
    rows: int
    """rows of the image"""
    prepared: dict[str, Tensor] = field(default_factory=dict)
    """outputs of `control_prompt`, which all steps read; empty before the first step"""
    number: int = field(default_factory=_numbers.__next__)

    def prepare(self, engines: Engines) -> bool:
        """Run `control_prompt` once. Return True if it ran before."""
        if self.prepared:
            return True
        engine = self.given.net.engines["control_prompt"]
        inputs = {t.name: self._input(t, engines.device) for t in engine.spec.inputs}
        prepared = call(engine, engines.arch, inputs)
        # All rows have the same map.
        prepared[HINT] = prepared[HINT].expand(len(inputs["context"]), -1, -1, -1)
        self.prepared = prepared
        return False

    def _input(self, spec: TensorSpec, device: torch.device) -> Tensor:
        hint = self.given.hints.get(spec.name)
        if hint is None:
            rows: Tensor = getattr(self.conditioning, spec.name)
            return rows[: self.rows if self.given.window.has_negative else 1].contiguous()
        return hint.to(device, torch_dtype(spec))[None].contiguous()


@dataclass
class ControlCalls:
    """Calls in the memory of a stage, whose lock the caller holds."""

    engines: Engines
    memory: StaticMemory
    number: int
    """identifies the addresses of the memory"""

    def run(
        self, layout: Layout, states: Sequence[ControlState], coefficients: Tensor, tables: Tables
    ) -> bool:
        """Run a step of the members' net. Return whether the call took its usual time."""
        was_prepared = [state.prepare(self.engines) for state in states]
        net = states[0].given.net
        deep = net.engines["control_deep"]
        sizes = self.memory.all_sizes({ROWS: layout.bucket, **dict(layout.axes)})
        inputs = {t.name: self._place(t, sizes) for t in deep.spec.inputs}
        outputs = {t.name: self._place(t, sizes) for t in deep.spec.outputs}
        latents = self.memory.lines("latents", sizes)
        images = [member.image for member in layout.members]
        torch.stack([image.latents for image in images], out=latents[: len(images)])
        tables.fill(coefficients, layout)
        strengths = [torch.tensor(state.given.strengths) for state in states]
        inputs["strengths"].copy_(torch.stack(layout.rows([each.unbind() for each in strengths])))
        self._load(layout, states, inputs)

        def work() -> None:
            with torch.inference_mode():
                scaled_sample(latents, tables, inputs["sample"], inputs["timestep"])
                deep(inputs, outputs)

        key = self.number, "control_deep", net.number, layout.axes, layout.bucket
        is_usual = self.engines.run_recorded("control_deep", key, work)
        self._keep(layout, [outputs[t.name] for t in deep.spec.outputs])
        return is_usual and all(was_prepared)

    def _place(self, spec: TensorSpec, sizes: dict[str, int]) -> Tensor:
        is_residual = spec.name.startswith(RESIDUAL)
        name = spec.name if is_residual else f"control {spec.name}"
        return self.memory.map(name, spec, sizes)

    def _load(
        self, layout: Layout, states: Sequence[ControlState], inputs: dict[str, Tensor]
    ) -> None:
        pairs = zip(states, layout.members, strict=True)
        content = layout.bucket, [(s.number, m.is_guided) for s, m in pairs]
        for name in states[0].prepared:
            target = inputs[name]
            if self.memory.contents.get(target.data_ptr()) != content:
                rows = layout.rows([state.prepared[name].unbind() for state in states])
                torch.stack(rows, out=target)
                self.memory.contents[target.data_ptr()] = content

    def _keep(self, layout: Layout, residuals: Sequence[Tensor]) -> None:
        """Add the call's residuals to the residuals of its images."""
        copies = [each[: layout.used_rows].clone() for each in residuals]
        for member, rows in zip(layout.members, layout.rows_of_members, strict=True):
            new = [[copy[row] for row in rows] for copy in copies]
            before = member.image.residuals
            pairs = zip(before, new, strict=True)
            member.image.residuals = [_sum(a, b) for a, b in pairs] if before else new


def _sum(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Add two lists of rows, of which one may be shorter."""
    pairs = itertools.zip_longest(first, second)
    return [a + b if a is not None and b is not None else a if b is None else b for a, b in pairs]
