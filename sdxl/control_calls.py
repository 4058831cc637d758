"""Runs ControlNets for images in flight: a call is one step of one net for all rows that it guides.

Its residuals are kept with the images until their next deep step, which adds them. They are added
up over nets in the order of the calls. It imports no policy and reads no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
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
    """of the image"""
    ready: dict[str, Tensor] = field(default_factory=dict)
    """outputs of `control_prompt`, which are the same in every step; empty before its first call"""
    number: int = field(default_factory=_numbers.__next__)

    def prepare(self, engines: Engines) -> bool:
        """Return whether there was nothing to do."""
        if self.ready:
            return True
        engine = self.given.net.engines["control_prompt"]
        inputs = {t.name: self._input(t, engines.device) for t in engine.spec.inputs}
        ready = call(engine, engines.arch, inputs)
        # The map is the same for all rows.
        ready[HINT] = ready[HINT].expand(len(inputs["context"]), -1, -1, -1)
        self.ready = ready
        return False

    def _input(self, spec: TensorSpec, device: torch.device) -> Tensor:
        shown = self.given.hints.get(spec.name)
        if shown is None:
            own: Tensor = getattr(self.conditioning, spec.name)
            return own[: self.rows if self.given.window.has_negative else 1].contiguous()
        return shown.to(device, torch_dtype(spec))[None].contiguous()


@dataclass
class ControlCalls:
    """The caller holds the lock of the stage, whose memory it shares."""

    engines: Engines
    memory: StaticMemory
    number: int
    """identifies the addresses of the memory"""
    _content: dict[int, Hashable] = field(default_factory=dict)
    """by address: whose outputs of `control_prompt` are there"""

    def run(
        self, layout: Layout, states: Sequence[ControlState], coefficients: Tensor, tables: Tables
    ) -> bool:
        """Run a step of the members' net; return whether it took its usual time."""
        was_ready = [state.prepare(self.engines) for state in states]
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
        return is_usual and all(was_ready)

    def _place(self, spec: TensorSpec, sizes: dict[str, int]) -> Tensor:
        is_residual = spec.name.startswith(RESIDUAL)
        name = spec.name if is_residual else f"control {spec.name}"
        return self.memory.map(name, spec, sizes)

    def _load(
        self, layout: Layout, states: Sequence[ControlState], inputs: dict[str, Tensor]
    ) -> None:
        pairs = zip(states, layout.members, strict=True)
        content = layout.bucket, [(s.number, m.is_guided) for s, m in pairs]
        for name in states[0].ready:
            target = inputs[name]
            if self._content.get(target.data_ptr()) != content:
                rows = layout.rows([state.ready[name].unbind() for state in states])
                torch.stack(rows, out=target)
                self._content[target.data_ptr()] = content

    def _keep(self, layout: Layout, residuals: Sequence[Tensor]) -> None:
        """Add the call's residuals to those of its images."""
        copies = [each[: layout.used_rows].clone() for each in residuals]
        for member, places in zip(layout.members, layout.rows_of_members, strict=True):
            made = [[copy[place] for place in places] for copy in copies]
            before = member.image.residuals
            pairs = zip(before, made, strict=True)
            member.image.residuals = [_sum(a, b) for a, b in pairs] if before else made


def _sum(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Add up rows, of which one may have fewer."""
    pairs = itertools.zip_longest(first, second)
    return [a + b if a is not None and b is not None else a if b is None else b for a, b in pairs]
