"""Adds LoRAs and embeddings to the ONNX graph of a network: each row's low-rank products, and
vectors for negative token ids, from banks that are inputs of the graph. The plain graph, with its
weights and scales, stays as it is.

It does what engines/low_rank.py does to a module. It knows no runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from engines.low_rank import TOKENS, VECTORS, bank_specs, is_adapted, shifts
from sdxl.specs import MOST_VECTORS, PAGE_RANK, ModelSpec, TensorSpec, layer_name, plain_name

PARTS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}
"""the part of a network's layers, if it is not the UNet"""
WEIGHT = ".weight"
PASSED = ("Cast", "DequantizeLinear", "Transpose")
"""between a weight and its layer"""
ROUNDING = ("DequantizeLinear", "QuantizeLinear")
"""before an 8-bit layer"""
KINDS = ("Conv", "Gemm", "MatMul")


def add_loras(graph: bytes, spec: ModelSpec) -> tuple[bytes, ModelSpec]:
    """Return the graph of a network of specs.VARIANTS, made from the plain one, and its spec with
    the bank."""
    model = onnx.load_model_from_string(graph)
    part = PARTS.get(plain_name(spec.name), "unet")
    weights = {t.name: tuple(t.dims) for t in model.graph.initializer}
    layers = {
        node.output[0]: (layer_name(part, key.removesuffix(WEIGHT)), shape)
        for node, key, shape in layers_of(model.graph)
        if is_adapted(spec.name, key)
    }
    layers |= {
        node.output[0]: (part + VECTORS, (MOST_VECTORS, weights[node.input[0]][1]))
        for node in model.graph.node
        if node.op_type == "Gather" and node.input[0].endswith(f"{TOKENS}{WEIGHT}")
    }
    dtype = spec.outputs[0].dtype
    bank = bank_specs(dict(layers.values()), dtype)
    writer = _Writer(model.graph)
    writer.begin(dtype)
    for node in model.graph.node:
        writer.copy(node, *layers.get(node.output[0], ("", ())))
    del model.graph.node[:]
    model.graph.node.extend(writer.nodes)
    model.graph.initializer.extend(writer.constants.values())
    model.graph.input.extend(map(graph_input, (*spec.inputs[-2:], *bank)))
    model.graph.name = spec.name
    return model.SerializeToString(deterministic=True), replace(spec, bank=bank)


def layers_of(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, str, tuple[int, ...]]]:
    """Yield each layer's node, its weight's name and shape."""
    weights = {t.name: (t.name, tuple(t.dims)) for t in graph.initializer}
    for node in graph.node:
        if node.op_type in PASSED and node.input[0] in weights:
            weights[node.output[0]] = weights[node.input[0]]
        elif node.op_type in KINDS and node.input[1] in weights:
            key, shape = weights[node.input[1]]
            if key.endswith(WEIGHT):
                yield node, key, shape


def graph_input(tensor: TensorSpec) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
    return helper.make_tensor_value_info(tensor.name, kind, tensor.dims)


@dataclass
class _Writer:
    """Copies a graph's nodes, and adds others behind its layers."""

    graph: onnx.GraphProto
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._made = {output: node for node in self.graph.node for output in node.output}

    def begin(self, dtype: str) -> None:
        """Compute what all layers share."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        own = self.add("Cast", "scales", to=kind)
        self.scales = self.add("Unsqueeze", own, self.numbers(2, 3))
        counts = self.add("Mul", self.add("Shape", "scales"), self.numbers(1, PAGE_RANK))
        self.merged = self.add("Concat", counts, self.numbers(-1), axis=0)
        """[rows, ranks, -1]"""
        self.dtype = dtype

    def copy(self, node: onnx.NodeProto, layer: str, shape: Sequence[int]) -> None:
        """Copy a node. Behind a layer, add its LoRAs' products; behind the table of tokens, take
        embeddings' vectors."""
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        if not layer:
            self.nodes.append(copied)
            return
        result = node.output[0]
        copied.output[0] = f"{result}.plain"
        if node.op_type == "Gather":
            self._embed(copied, layer, result)
            return
        self.nodes.append(copied)
        given = self._unrounded(node.input[0])
        if node.op_type == "Conv":
            added = self._convolved(given, layer, node, shape)
        elif node.op_type == "Gemm":
            one = self.numbers(1)
            tokens = self.add("Unsqueeze", given, one)
            added = self.add("Squeeze", self._product(tokens, layer, shape), one)
        else:
            added = self._product(given, layer, shape)
        self.add("Add", copied.output[0], added, output=result)

    def _embed(self, plain: onnx.NodeProto, vectors: str, result: str) -> None:
        """Look up ids in the table, but negative ones among the vectors."""
        ids, zero = plain.input[1], self.numbers(0)
        plain.input[1] = self.add("Max", ids, zero)
        self.nodes.append(plain)
        places = self.add("Max", self.add("Sub", self.numbers(-1), ids), zero)
        learned = self.add("Gather", vectors, places, axis=0)
        is_learned = self.add("Unsqueeze", self.add("Less", ids, zero), self.numbers(-1))
        self.add("Where", is_learned, learned, plain.output[0], output=result)

    def _product(self, x: str, layer: str, shape: Sequence[int]) -> str:
        """[rows, tokens, in] → [rows, tokens, out]"""
        down = self.add("Gather", f"{layer}.down", "pages", axis=0)
        down = self.add("Reshape", down, self.numbers(0, -1, shape[1]))
        down = self.add("Transpose", down, perm=[0, 2, 1])
        return self.add("MatMul", self.add("MatMul", x, down), self._up(layer, shape))

    def _up(self, layer: str, shape: Sequence[int]) -> str:
        """[rows, ranks, out], scaled"""
        up = self.add("Gather", f"{layer}.up", "pages", axis=0)
        return self.add("Reshape", self.add("Mul", up, self.scales), self.numbers(0, -1, shape[0]))

    def _convolved(self, x: str, layer: str, node: onnx.NodeProto, shape: Sequence[int]) -> str:
        """As low_rank's."""
        outputs, inputs, width, _ = shape
        down = self.add("Gather", f"{layer}.down", "pages", axis=0)
        down = self.add("Reshape", down, self.numbers(0, -1, inputs))
        flat = self.add("Reshape", x, self.numbers(0, inputs, -1))
        maps = self.add("MatMul", down, flat)
        channels = self.numbers(-1, PAGE_RANK * width * width)
        sides = self.add("Concat", channels, self.add("Shape", x, start=2), axis=0)
        maps = self.add("Reshape", maps, sides)
        given: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        given |= {"group": PAGE_RANK, "kernel_shape": [width, width]}
        summed = self.add("Conv", maps, self.shifts(width), **given)
        ranks = self.add("Reshape", summed, self.merged)
        up = self.add("Transpose", self._up(layer, shape), perm=[0, 2, 1])
        added = self.add("MatMul", up, ranks)
        sides = self.add("Shape", summed, start=2)
        return self.add(
            "Reshape", added, self.add("Concat", self.numbers(0, outputs), sides, axis=0)
        )

    def _unrounded(self, value: str) -> str:
        """The input of an 8-bit layer before it was rounded."""
        while (node := self._made.get(value)) is not None and node.op_type in ROUNDING:
            value = node.input[0]
        return value

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"lora.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], output, **attributes))
        return output

    def numbers(self, *values: int) -> str:
        return self._constant(f"lora.{values}", np.array(values, np.int64))

    def shifts(self, width: int) -> str:
        return self._constant(f"lora.shifts_{width}", shifts(width).numpy().astype(self.dtype))

    def _constant(self, name: str, value: Any) -> str:
        self.constants[name] = numpy_helper.from_array(value, name)
        return name
