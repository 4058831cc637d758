"""A network's tensors as JSON: what export.json and manifest.json both say of a graph or a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdxl.specs import OPTIONAL, Architecture, Cut, ModelSpec, TensorSpec, brief, network_specs

SIDES = ("inputs", "outputs")
DTYPES = ("float32", "float16", "bfloat16")
"""of activations"""


def spec_as_dict(spec: ModelSpec) -> dict[str, list[list[Any]]]:
    return {side: [[t.name, t.dtype, *t.dims] for t in getattr(spec, side)] for side in SIDES}


def spec_from_dict(name: str, value: Mapping[str, Any]) -> ModelSpec:
    inputs, outputs = (
        tuple(TensorSpec(tensor, dtype, tuple(dims)) for tensor, dtype, *dims in value[side])
        for side in SIDES
    )
    return ModelSpec(name, inputs, outputs)


def difference(found: ModelSpec, needed: ModelSpec) -> str | None:
    """What is other in these tensors than it should be, in words."""
    for side in SIDES:
        theirs, ours = getattr(found, side), getattr(needed, side)
        if theirs != ours:
            return f"{found.name} has the {side} {_shown(theirs)}; needed {_shown(ours)}"
    return None


def outdated(specs: Mapping[str, ModelSpec], arch: Architecture, cut: Cut) -> str | None:
    """What keeps these from being today's networks, in words: names, dims and types."""
    for name in network_specs(arch, cut=cut):
        if name not in specs:
            if name in OPTIONAL and not arch.masked_channels:
                continue
            return f"{name!r} is missing"
        found = specs[name]
        if not (found.inputs and found.outputs):
            return f"{name!r} has no inputs or no outputs"
        if (dtype := found.outputs[0].dtype) not in DTYPES:
            return f"{name!r} has outputs of {brief(dtype)}, needed one of {', '.join(DTYPES)}"
        needed = network_specs(arch, dtype, cut)[name]
        if wrong := difference(found, needed):
            return wrong
    return None


def _shown(tensors: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{t.name} {t.dtype}[{', '.join(map(str, t.dims))}]" for t in tensors)
