"""Adds LoRAs and embeddings to the ONNX graph of a network: each row's low-rank products, and
vectors for negative token ids. The bank's tensors are inputs of the graph. The plain graph's nodes,
weights and scales do not change.

engines/low_rank.py does the same to a module. It knows no runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from engines.low_rank import TOKENS, VECTORS, bank_specs, is_adapted, shifts
from sdxl.specs import MOST_VECTORS, PAGE_RANK, ModelSpec, TensorSpec, layer_name, plain_name

PARTS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}
"""the part of a network's layers; of other networks, the UNet"""
WEIGHT = ".weight"
BEHIND_WEIGHTS = ("Cast", "DequantizeLinear", "Transpose")
"""nodes between a weight and its layer"""
ROUNDING = ("DequantizeLinear", "QuantizeLinear")
"""nodes before an 8-bit layer"""
LAYERS = ("Conv", "Gemm", "MatMul")


def add_loras(graph: bytes, spec: ModelSpec) -> tuple[bytes, ModelSpec]:
    """Return the graph of a network of specs.VARIANTS, made from the plain network's `graph`, and
    its spec with the bank."""
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
    writer = _LoraWriter(model.graph, dtype)
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
        if node.op_type in BEHIND_WEIGHTS and node.input[0] in weights:
            weights[node.output[0]] = weights[node.input[0]]
        elif node.op_type in LAYERS and node.input[1] in weights:
            key, shape = weights[node.input[1]]
            if key.endswith(WEIGHT):
                yield node, key, shape


def graph_input(tensor: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(tensor.name, onnx_type(tensor.dtype), tensor.dims)


def onnx_type(dtype: str) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def nodes_by_output(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    return {output: node for node in graph.node for output in node.output}


class NodeWriter:
    """Writes nodes and constants. The names of new ones begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        output = output or f"{self.prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], output, **attributes))
        return output

    def numbers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def constant(self, value: Any, name: str = "") -> str:
        name = f"{self.prefix}.{name or f'constant_{value.tolist()}'}"
        self.constants[name] = numpy_helper.from_array(value, name)
        return name


class _LoraWriter(NodeWriter):
    """Copies a graph's nodes, and adds nodes for LoRAs and embeddings behind its layers."""

    def __init__(self, graph: onnx.GraphProto, dtype: str) -> None:
        super().__init__("lora")
        self.dtype = dtype
        self._nodes_by_output = nodes_by_output(graph)
        scales = self.add("Cast", "scales", to=onnx_type(dtype))
        self.scales = self.add("Unsqueeze", scales, self.numbers(2, 3))
        counts = self.add("Mul", self.add("Shape", "scales"), self.numbers(1, PAGE_RANK))
        self.merged = self.add("Concat", counts, self.numbers(-1), axis=0)
        """[rows, ranks, -1]"""

    def copy(self, node: onnx.NodeProto, layer: str, shape: Sequence[int]) -> None:
        """Copy a node. Behind a layer, add the LoRAs' products; behind the table of tokens, look up
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
        x = self._unrounded(node.input[0])
        if node.op_type == "Conv":
            added = self._convolution(x, layer, node, shape)
        elif node.op_type == "Gemm":
            one = self.numbers(1)
            tokens = self.add("Unsqueeze", x, one)
            added = self.add("Squeeze", self._product(tokens, layer, shape), one)
        else:
            added = self._product(x, layer, shape)
        self.add("Add", copied.output[0], added, output=result)

    def _embed(self, plain: onnx.NodeProto, vectors: str, result: str) -> None:
        """Look up ids in the table, but negative ids among the vectors."""
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

    def _convolution(self, x: str, layer: str, node: onnx.NodeProto, shape: Sequence[int]) -> str:
        """Write low_rank.py's convolution."""
        outputs, inputs, width, _ = shape
        down = self.add("Gather", f"{layer}.down", "pages", axis=0)
        down = self.add("Reshape", down, self.numbers(0, -1, inputs))
        flat = self.add("Reshape", x, self.numbers(0, inputs, -1))
        maps = self.add("MatMul", down, flat)
        channels = self.numbers(-1, PAGE_RANK * width * width)
        sides = self.add("Concat", channels, self.add("Shape", x, start=2), axis=0)
        maps = self.add("Reshape", maps, sides)
        attributes: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        attributes |= {"group": PAGE_RANK, "kernel_shape": [width, width]}
        weight = self.constant(shifts(width).numpy().astype(self.dtype), f"shifts_{width}")
        summed = self.add("Conv", maps, weight, **attributes)
        ranks = self.add("Reshape", summed, self.merged)
        up = self.add("Transpose", self._up(layer, shape), perm=[0, 2, 1])
        added = self.add("MatMul", up, ranks)
        sides = self.add("Shape", summed, start=2)
        return self.add(
            "Reshape", added, self.add("Concat", self.numbers(0, outputs), sides, axis=0)
        )

    def _unrounded(self, value: str) -> str:
        """Return an 8-bit layer's input before it was rounded."""
        while (node := self._nodes_by_output.get(value)) is not None and node.op_type in ROUNDING:
            value = node.input[0]
        return value
