"""ONNX graphs for ControlNets: networks of the UNet that add residuals, and a net's `control_deep`.
They are made from a UNet's graphs, so every export has them.

sdxl/networks/unet.py and control.py do the same to modules. It knows no runtime.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper

from engines.folders.export_folder import SMOOTHING
from engines.image_graphs import add_images
from engines.lora_graphs import (
    NodeWriter,
    add_loras,
    graph_input,
    layers_of,
    nodes_by_output,
    onnx_type,
)
from sdxl.specs import IMAGE, IMAGE_KEYS, IMAGE_MASK, ModelSpec, TensorSpec, lora_name, plain_name

JOINED = re.compile(r"up_blocks\.(\d+)\.resnets\.(\d+)\.conv_shortcut\.weight")
"""the layer that reads the joined inputs of a ResBlock on the way up"""
PREPARING = ("DequantizeLinear", "Mul", "QuantizeLinear")
"""nodes between a join and an 8-bit layer: smoothing and rounding"""
HIDDEN, SKIP = 0, 1
"""the two inputs of a join"""
CONTROL_PREFIX = "control_"
"""the beginning of the names of `control_deep`'s inputs; the UNet's names lack it"""
PROJECTIONS, LAST_PROJECTION = "controlnet_down_blocks", "controlnet_mid_block"
ELSEWHERE = "given at load"
"""the location of weights that a graph does not hold"""

Shapes = Mapping[str, tuple[int, ...]]


class ControlGraphError(RuntimeError):
    """A graph lacks a place for a residual."""


def variant_graph(graph: bytes, spec: ModelSpec) -> tuple[bytes, ModelSpec]:
    """Return the graph of a network with LoRAs, residuals and image prompts, as its name says, and
    its spec with the bank. It is made from the plain network's `graph`."""
    name = lora_name(spec.name)
    bank: tuple[TensorSpec, ...] = ()
    inputs = tuple(t for t in spec.inputs if not t.name.startswith((IMAGE_KEYS, IMAGE_MASK)))
    without = replace(spec, name=spec.name.removesuffix(f"+{IMAGE}"), inputs=inputs)
    if name != plain_name(name):
        graph, adapted = add_loras(graph, replace(without, name=name))
        bank = adapted.bank
    if name != without.name:
        graph = add_residuals(graph, without)
    if without.name != spec.name:
        graph = add_images(graph, spec)
    return graph, replace(spec, bank=bank)


def add_residuals(graph: bytes, spec: ModelSpec) -> bytes:
    """Return the graph of a network of specs.with_residuals, made from the `graph` without
    residuals, which may have LoRAs. Weights and scales do not change."""
    model = onnx.load_model_from_string(graph)
    plain_inputs = {each.name for each in model.graph.input}
    residuals = [tensor for tensor in spec.inputs if tensor.name not in plain_inputs]
    places = _residual_places(model.graph)
    # Shallow takes only the residuals of skips that it computes; its cache contains the others.
    is_shallow = plain_name(spec.name) == "unet_shallow"
    if len(places) < len(residuals) or (len(places) > len(residuals) and not is_shallow):
        found = f"found {len(places)} places for {len(residuals)} residuals"
        raise ControlGraphError(f"{spec.name}: {found}; export again")
    for tensor, (join, index) in zip(residuals, places, strict=False):
        _add_residual(model.graph, tensor.name, join, index)
    model.graph.input.extend(map(graph_input, residuals))
    model.graph.name = spec.name
    return model.SerializeToString(deterministic=True)


def control_graph(graph: bytes, spec: ModelSpec, shapes: Shapes) -> tuple[bytes, list[str]] | None:
    """Return the graph of a net's `control_deep`, made from `unet_deep`'s plain graph, and the
    names of its weights. None if the net differs from the UNet's way down.

    The weights are external, the net's tensors with these shapes. They are not quantised."""
    model = onnx.load_model_from_string(graph)
    way = _WayDown(model.graph, spec)
    weights = way.write()
    used = {name for node in way.nodes for name in node.input}
    inputs = {tensor.name for tensor in spec.inputs}
    missing_weights = (weights & used) - set(shapes)
    unknown_inputs = {each.name for each in model.graph.input} & used - inputs
    if missing_weights or unknown_inputs or not inputs <= used:
        return None
    constants = [each for each in model.graph.initializer if each.name in used - set(shapes)]
    kind = onnx_type(spec.outputs[0].dtype)
    names = sorted(used & set(shapes))
    control = helper.make_graph(
        way.nodes,
        spec.name,
        [graph_input(tensor) for tensor in spec.inputs],
        [graph_input(tensor) for tensor in spec.outputs],
        [*constants, *way.constants.values(), *(_external(n, kind, shapes[n]) for n in names)],
    )
    model.graph.CopyFrom(control)
    return model.SerializeToString(deterministic=True), names


class _WayDown(NodeWriter):
    """Copies the nodes of a UNet's way down, with a net's inputs, weights and projections."""

    def __init__(self, graph: onnx.GraphProto, spec: ModelSpec) -> None:
        super().__init__("control")
        self.graph, self.spec = graph, spec
        self._nodes_by_output = nodes_by_output(graph)
        self._dims = {each.name: _dims(each) for each in graph.input}
        names = {tensor.name for tensor in spec.inputs}
        self._replaced = {
            name: CONTROL_PREFIX + name for name in self._dims if CONTROL_PREFIX + name in names
        }
        """Names of the UNet's values, and the values that nodes read instead."""

    def write(self) -> set[str]:
        """Write the nodes; return the names of all weights of the UNet."""
        places = _residual_places(self.graph)
        values = [self._nodes_by_output[join].input[index] for join, index in places]
        weights = self._bypass_casts()
        self._bypass_rounding()
        first = values[0]
        hinted = f"{first}.hinted"
        for node in self._nodes_before(values):
            self.nodes.append(copied := onnx.NodeProto())
            copied.CopyFrom(node)
            measured = self._measured_input(node)
            copied.input[:] = [measured or self._source(name) for name in node.input]
            if first in node.output:
                self.add("Add", first, f"{CONTROL_PREFIX}hint", output=hinted)
                self._replaced[first] = hinted
        self._project([self._source(value) for value in values])
        return weights

    def _bypass_casts(self) -> set[str]:
        """Let layers read their weights directly, because the net's weights have the type of the
        computation. Return the names of all weights."""
        external = {t.name for t in self.graph.initializer if t.external_data}
        for node in self.graph.node:
            if node.op_type in ("Cast", "DequantizeLinear") and node.input[0] in external:
                self._replaced[node.output[0]] = node.input[0]
        return external

    def _bypass_rounding(self) -> None:
        for node in self.graph.node:
            rounding = self._nodes_by_output.get(node.input[0]) if node.input else None
            if node.op_type != "DequantizeLinear" or rounding is None:
                continue
            value = rounding.input[0]
            smoothing = self._nodes_by_output.get(value)
            if smoothing is not None and smoothing.input[-1].endswith(SMOOTHING):
                value = smoothing.input[0]
            self._replaced[node.output[0]] = value

    def _measured_input(self, node: onnx.NodeProto) -> str:
        """Return the net's input that has the axes that a Shape node reads from an input of the
        UNet; empty if there is none."""
        dims = self._dims.get(node.input[0], ()) if node.op_type == "Shape" else ()
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        span = slice(attributes.get("start", 0), attributes.get("end"))
        same = (t.name for t in self.spec.inputs if dims and t.dims[span] == dims[span])
        return next(same, "")

    def _source(self, name: str) -> str:
        while name in self._replaced:
            name = self._replaced[name]
        return name

    def _nodes_before(self, values: Sequence[str]) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that compute these values, in the graph's order."""
        needed, kept = {self._source(value) for value in values}, []
        for node in reversed(self.graph.node):
            if needed & set(node.output):
                needed |= {self._source(name) for name in node.input}
                kept.append(node)
        yield from reversed(kept)

    def _project(self, values: Sequence[str]) -> None:
        """Write the residuals: the values' projections, multiplied by the rows' strengths."""
        strengths = self.add("Cast", "strengths", to=onnx_type(self.spec.outputs[0].dtype))
        strengths = self.add("Unsqueeze", strengths, self.numbers(2, 3, 4))
        layers = [f"{PROJECTIONS}.{index}" for index in range(len(values) - 1)]
        for index, (layer, value, residual) in enumerate(
            zip([*layers, LAST_PROJECTION], values, self.spec.outputs, strict=True)
        ):
            strength = self.add(
                "Gather", strengths, self.constant(np.array(index, np.int64)), axis=1
            )
            projected = self.add("Conv", value, f"{layer}.weight", f"{layer}.bias")
            self.add("Mul", projected, strength, output=residual.name)


def _residual_places(graph: onnx.GraphProto) -> list[tuple[str, int]]:
    """Return the places of residuals in their order: a join's output, and the number of the join's
    input to which the residual is added."""
    joins = _joins(graph)
    # The joins read the skips in reverse; the first join reads the middle block's output.
    return [*((join, SKIP) for join in reversed(joins)), *((join, HIDDEN) for join in joins[:1])]


def _joins(graph: onnx.GraphProto) -> list[str]:
    """Return the outputs of the nodes that join a skip, in the order in which they run."""
    by_output = nodes_by_output(graph)
    joins = {}
    for layer, key, _ in layers_of(graph):
        if match := JOINED.fullmatch(key):
            node = by_output.get(layer.input[0])
            while node is not None and node.op_type in PREPARING:
                node = by_output.get(node.input[0])
            if node is not None and node.op_type == "Concat":
                joins[tuple(map(int, match.groups()))] = node.output[0]
    return [joins[place] for place in sorted(joins)]


def _add_residual(graph: onnx.GraphProto, residual: str, join: str, index: int) -> None:
    """Add a residual to an input of a join. Other nodes read the input without the residual; an
    output of the graph contains the residual."""
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


def _dims(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _external(name: str, kind: int, shape: Sequence[int]) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=ELSEWHERE)
    return tensor
