"""ONNX graphs for ControlNets, made from a UNet's, so that every export has them: networks of the
UNet that add residuals, and a net's `control_deep`.

It does what sdxl/networks/unet.py and control.py do. It knows no runtime.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from engines.folders.export_folder import SMOOTHING
from engines.image_graphs import add_images
from engines.lora_graphs import add_loras, graph_input, layers_of
from sdxl.specs import (
    IMAGE,
    IMAGE_KEYS,
    IMAGE_MASK,
    ModelSpec,
    TensorSpec,
    lora_name,
    plain_name,
)

JOINED = re.compile(r"up_blocks\.(\d+)\.resnets\.(\d+)\.conv_shortcut\.weight")
"""the layer that reads what a ResBlock on the way up has joined"""
PREPARING = ("DequantizeLinear", "Mul", "QuantizeLinear")
"""between a join and an 8-bit layer: smoothing and rounding"""
HIDDEN, SKIP = 0, 1
"""what is joined"""
OWN = "control_"
"""The inputs of `control_deep` that a UNet has without it in their names."""
PROJECTIONS, LAST_PROJECTION = "controlnet_down_blocks", "controlnet_mid_block"
ELSEWHERE = "given at load"
"""the location of weights that a graph does not hold"""

Shapes = Mapping[str, tuple[int, ...]]


class ControlGraphError(RuntimeError):
    """A graph that has no place for a residual."""


def variant_graph(graph: bytes, spec: ModelSpec) -> tuple[bytes, ModelSpec]:
    """Return the graph of a network with LoRAs, residuals and image prompts, as its name says, made
    from the plain one, and its spec with the bank."""
    name, images = lora_name(spec.name), (IMAGE_KEYS, IMAGE_MASK)
    bank: tuple[TensorSpec, ...] = ()
    own = tuple(t for t in spec.inputs if not t.name.startswith(images))
    without = replace(spec, name=spec.name.removesuffix(f"+{IMAGE}"), inputs=own)
    if name != plain_name(name):
        graph, adapted = add_loras(graph, replace(without, name=name))
        bank = adapted.bank
    if name != without.name:
        graph = add_residuals(graph, without)
    if without.name != spec.name:
        graph = add_images(graph, spec)
    return graph, replace(spec, bank=bank)


def add_residuals(graph: bytes, spec: ModelSpec) -> bytes:
    """Return the graph of a network of specs.with_residuals, made from the one without, which may
    have LoRAs. Weights and scales stay as they are."""
    model = onnx.load_model_from_string(graph)
    given = {each.name for each in model.graph.input}
    residuals = [tensor for tensor in spec.inputs if tensor.name not in given]
    places = _places(model.graph)
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


def control_graph(graph: bytes, spec: ModelSpec, shapes: Shapes) -> tuple[bytes, list[str]] | None:
    """Return the graph of a net's `control_deep`, made from the plain one of `unet_deep`, and the
    names of its weights; None if the net is not like the UNet's way down.

    The weights are external: the net's tensors, which have these shapes, and are not quantised."""
    model = onnx.load_model_from_string(graph)
    way = _WayDown(model.graph, spec)
    weights = way.write()
    used = {name for node in way.nodes for name in node.input}
    given = {tensor.name for tensor in spec.inputs}
    lost = (weights & used) - set(shapes)
    unknown = {each.name for each in model.graph.input} & used - given
    if lost or unknown or not given <= used:
        return None
    constants = [each for each in model.graph.initializer if each.name in used - set(shapes)]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(spec.outputs[0].dtype))
    names = sorted(used & set(shapes))
    made = helper.make_graph(
        way.nodes,
        spec.name,
        [graph_input(tensor) for tensor in spec.inputs],
        [graph_input(tensor) for tensor in spec.outputs],
        [*constants, *way.constants.values(), *(_external(n, kind, shapes[n]) for n in names)],
    )
    model.graph.CopyFrom(made)
    return model.SerializeToString(deterministic=True), names


class _WayDown:
    """Copies the nodes of a UNet's way down, with what a net has instead."""

    def __init__(self, graph: onnx.GraphProto, spec: ModelSpec) -> None:
        self.graph, self.spec = graph, spec
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._made = _makers(graph)
        self._dims = {each.name: _dims(each) for each in graph.input}
        own = {tensor.name for tensor in spec.inputs}
        self._instead = {name: OWN + name for name in self._dims if OWN + name in own}

    def write(self) -> set[str]:
        """Write the nodes; return the names of all weights of the UNet."""
        values = [self._made[join].input[index] for join, index in _places(self.graph)]
        weights = self._take_weights()
        self._leave_out_rounding()
        first = values[0]
        hinted = f"{first}.hinted"
        for node in self._before(values):
            self.nodes.append(copied := onnx.NodeProto())
            copied.CopyFrom(node)
            copied.input[:] = [self._measured(node) or self._source(name) for name in node.input]
            if first in node.output:
                self._add("Add", first, f"{OWN}hint", output=hinted)
                self._instead[first] = hinted
        self._project([self._source(value) for value in values])
        return weights

    def _take_weights(self) -> set[str]:
        """Let layers read weights themselves: the net's have the type that they compute in."""
        external = {t.name for t in self.graph.initializer if t.external_data}
        for node in self.graph.node:
            if node.op_type in ("Cast", "DequantizeLinear") and node.input[0] in external:
                self._instead[node.output[0]] = node.input[0]
        return external

    def _leave_out_rounding(self) -> None:
        for node in self.graph.node:
            rounding = self._made.get(node.input[0]) if node.input else None
            if node.op_type != "DequantizeLinear" or rounding is None:
                continue
            value = rounding.input[0]
            smoothing = self._made.get(value)
            if smoothing is not None and smoothing.input[-1].endswith(SMOOTHING):
                value = smoothing.input[0]
            self._instead[node.output[0]] = value

    def _measured(self, node: onnx.NodeProto) -> str:
        """Return an input of the net from which a node reads the axes that it reads from another of
        the UNet's."""
        dims = self._dims.get(node.input[0], ()) if node.op_type == "Shape" else ()
        given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        span = slice(given.get("start", 0), given.get("end"))
        same = (t.name for t in self.spec.inputs if dims and t.dims[span] == dims[span])
        return next(same, "")

    def _source(self, name: str) -> str:
        while name in self._instead:
            name = self._instead[name]
        return name

    def _before(self, values: Sequence[str]) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that these values need, in their order."""
        needed, kept = {self._source(value) for value in values}, []
        for node in reversed(self.graph.node):
            if needed & set(node.output):
                needed |= {self._source(name) for name in node.input}
                kept.append(node)
        yield from reversed(kept)

    def _project(self, values: Sequence[str]) -> None:
        """Write the residuals: projections, multiplied by the rows' strengths."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.spec.outputs[0].dtype))
        shares = self._add("Cast", "strengths", to=kind)
        shares = self._add("Unsqueeze", shares, self._constant([2, 3, 4]))
        layers = [f"{PROJECTIONS}.{index}" for index in range(len(values) - 1)]
        for index, (layer, value, residual) in enumerate(
            zip([*layers, LAST_PROJECTION], values, self.spec.outputs, strict=True)
        ):
            share = self._add("Gather", shares, self._constant(index), axis=1)
            projected = self._add("Conv", value, f"{layer}.weight", f"{layer}.bias")
            self._add("Mul", projected, share, output=residual.name)

    def _add(self, operator: str, *inputs: str, output: str = "", **attributes: int) -> str:
        output = output or f"control.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], output, **attributes))
        return output

    def _constant(self, value: int | list[int]) -> str:
        name = f"control.constant_{value}"
        self.constants[name] = numpy_helper.from_array(np.array(value, np.int64), name)
        return name


def _places(graph: onnx.GraphProto) -> list[tuple[str, int]]:
    """Return what residuals are added to, in their order: a join's output, and which of its
    inputs."""
    joins = _joins(graph)
    # The first skip is read last, and the middle block's output first.
    return [*((join, SKIP) for join in reversed(joins)), *((join, HIDDEN) for join in joins[:1])]


def _joins(graph: onnx.GraphProto) -> list[str]:
    """Return the outputs of the nodes that join a skip, in the order they run."""
    made = _makers(graph)
    joins = {}
    for layer, key, _ in layers_of(graph):
        if match := JOINED.fullmatch(key):
            node = made.get(layer.input[0])
            while node is not None and node.op_type in PREPARING:
                node = made.get(node.input[0])
            if node is not None and node.op_type == "Concat":
                joins[tuple(map(int, match.groups()))] = node.output[0]
    return [joins[place] for place in sorted(joins)]


def _makers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    return {output: node for node in graph.node for output in node.output}


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


def _dims(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _external(name: str, kind: int, shape: Sequence[int]) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=ELSEWHERE)
    return tensor
