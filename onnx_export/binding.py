"""Replaces a traced graph's weights by references to bytes of safetensors files.

A Cast or Q/DQ in the graph converts weights that are stored in another type; runtimes do so once at
load. Scales are stored in files too.

Q/DQ is added to the graph, not to the torch module. So a traced graph serves every precision,
unquantised weights stay in the checkpoint's files, and Deep and Shallow share the quantised ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from engines.folders.export_folder import INPUT_SCALE, SCALE, SMOOTHING, WEIGHT
from onnx_export.stored import Stored


def bind(model: ir.Model, keys: Mapping[str, str], places: Mapping[str, Stored]) -> None:
    """Bind a graph's initialisers without values; `keys` are their names in the files."""
    binder = _Binder(model.graph, places)
    for value in [v for v in model.graph.initializers.values() if v.const_value is None]:
        assert value.name is not None
        binder.bind(value, keys[value.name])


@dataclass
class _Binder:
    graph: ir.Graph
    places: Mapping[str, Stored]
    quantised: dict[tuple[ir.Value, Stored, Stored | None], ir.Value] = field(default_factory=dict)
    """inputs with Q/DQ by input, scale and smoothing; several layers may share one"""

    def __post_init__(self) -> None:
        self.first = self.graph[0]

    def bind(self, value: ir.Value, key: str) -> None:
        """Replace an initialiser without a value by the tensor stored as `key`."""
        del self.graph.initializers[value.name]
        assert value.dtype is not None
        stored = self.places[key]
        weight = self.initialiser(key)
        layer = key.removesuffix(WEIGHT)
        if layer + SCALE in self.places:
            scale, name = self.initialiser(layer + SCALE), f"{layer}.weight_dequantised"
            weight = self.added(self.first, "DequantizeLinear", [weight, scale], name, axis=0)
            for node in list(_readers(value)):
                self.quantise_input(node, layer, stored.dtype)
        elif stored.dtype != value.dtype:
            weight = self.added(self.first, "Cast", [weight], f"{key}.cast", to=value.dtype)
        value.replace_all_uses_with(weight)

    def quantise_input(self, node: ir.Node, layer: str, dtype: ir.DataType) -> None:
        value = node.inputs[0]
        assert value is not None
        smoothing = self.places.get(layer + SMOOTHING)
        key = (value, self.places[layer + INPUT_SCALE], smoothing)
        if key not in self.quantised:
            if smoothing is not None:
                factors = self.initialiser(layer + SMOOTHING)
                value = self.added(node, "Mul", [value, factors], f"{layer}.input_smoothed")
            scale, zero = self.initialiser(layer + INPUT_SCALE), self.zero(dtype)
            inputs, name = [value, scale, zero], f"{layer}.input_quantised"
            inputs[0] = self.added(node, "QuantizeLinear", inputs, name)
            name = f"{layer}.input_dequantised"
            self.quantised[key] = self.added(node, "DequantizeLinear", inputs, name)
        node.replace_input_with(0, self.quantised[key])

    def initialiser(self, key: str) -> ir.Value:
        if key not in self.graph.initializers:
            self.graph.register_initializer(self.places[key].as_initialiser(key))
        return self.graph.initializers[key]

    def zero(self, dtype: ir.DataType) -> ir.Value:
        """The zero point, which gives QuantizeLinear its output type."""
        name = f"zero_{dtype.name.lower()}"
        if name not in self.graph.initializers:
            tensor = ir.tensor(np.zeros((), dtype.numpy()), dtype=dtype, name=name)
            self.graph.register_initializer(
                ir.Value(
                    name=name, type=ir.TensorType(dtype), shape=ir.Shape(()), const_value=tensor
                )
            )
        return self.graph.initializers[name]

    def added(
        self, before: ir.Node, operator: str, inputs: list[ir.Value], name: str, **attributes: int
    ) -> ir.Value:
        output = ir.Value(name=name)
        node = ir.node(operator, inputs, attributes, outputs=[output], name=f"{name}.node")
        self.graph.insert_before(before, node)
        return output


def _readers(weight: ir.Value) -> Iterator[ir.Node]:
    """Yield the nodes that read a weight, directly or through transposes."""
    for node in weight.consumers():
        if node.op_type == "Transpose":
            yield from _readers(node.outputs[0])
        else:
            yield node
