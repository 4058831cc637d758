"""Adds the residuals of ControlNets to the ONNX graph of a UNet's network, as inputs. The graph may
have LoRAs; its weights and scales stay as they are.

It does what sdxl/networks/unet.py does with residuals. It knows no runtime.
"""

from __future__ import annotations

import re

import onnx
from onnx import helper

from engines.lora_graphs import graph_input, layers_of
from sdxl.specs import ModelSpec, plain_name

JOINED = re.compile(r"up_blocks\.(\d+)\.resnets\.(\d+)\.conv_shortcut\.weight")
"""the layer that reads what a ResBlock on the way up has joined"""
PREPARING = ("DequantizeLinear", "Mul", "QuantizeLinear")
"""before an 8-bit layer: its input is smoothed and rounded"""
HIDDEN, SKIP = 0, 1
"""what is joined"""


class ControlGraphError(RuntimeError):
    """A graph that has no place for a residual."""


def add_residuals(graph: bytes, spec: ModelSpec) -> bytes:
    """Return the graph of a network of specs.with_residuals, made from the one without."""
    model = onnx.load_model_from_string(graph)
    given = {each.name for each in model.graph.input}
    residuals = [tensor for tensor in spec.inputs if tensor.name not in given]
    joins = _joins(model.graph)
    # The first skip is read last, and the middle block's output first.
    places = [*((join, SKIP) for join in reversed(joins)), *((join, HIDDEN) for join in joins[:1])]
    # Shallow takes only the residuals of skips that it makes; its cache has the others in it.
    is_shallow = plain_name(spec.name) == "unet_shallow"
    if len(places) < len(residuals) or (len(places) > len(residuals) and not is_shallow):
        found = f"found {len(places)} places for {len(residuals)} residuals"
        raise ControlGraphError(f"{spec.name}: {found}; export again")
    for tensor, (join, index) in zip(residuals, places, strict=False):
        _add(model.graph, tensor.name, join, index)
    model.graph.input.extend(map(graph_input, residuals))
    model.graph.name = spec.name
    return model.SerializeToString(deterministic=True)


def _joins(graph: onnx.GraphProto) -> list[str]:
    """Return the outputs of the nodes that join a skip, in the order they run."""
    made = {output: node for node in graph.node for output in node.output}
    joins = {}
    for layer, key, _ in layers_of(graph):
        if match := JOINED.fullmatch(key):
            node = made.get(layer.input[0])
            while node is not None and node.op_type in PREPARING:
                node = made.get(node.input[0])
            if node is not None and node.op_type == "Concat":
                joins[tuple(map(int, match.groups()))] = node.output[0]
    return [joins[place] for place in sorted(joins)]


def _add(graph: onnx.GraphProto, residual: str, join: str, index: int) -> None:
    """Add a residual to an input of a join. Other nodes read that value without it; an output of
    the graph has it."""
    place = next(i for i, node in enumerate(graph.node) if join in node.output)
    value = graph.node[place].input[index]
    result = f"{residual}.sum"
    if any(value == output.name for output in graph.output):
        result, value = value, f"{value}.alone"
        for node in graph.node:
            for names in (node.input, node.output):
                for i, name in enumerate(names):
                    if name == result:
                        names[i] = value
    graph.node[place].input[index] = result
    graph.node.insert(place, helper.make_node("Add", [value, residual], [result]))
