"""ONNX graphs that attend to image prompts, made from a UNet's, so that every export has them.

It does what sdxl/networks/attention.py does to a module. It knows no runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from engines.lora_graphs import graph_input
from sdxl.specs import IMAGE_KEYS, IMAGE_MASK, ModelSpec

ATTENTION, HEADS = "Attention", "q_num_heads"
ENDING = ".text"
"""of the results of attention to the text alone"""


class ImageGraphError(RuntimeError):
    """A graph that attends to no text."""


def add_images(graph: bytes, spec: ModelSpec) -> bytes:
    """Return the graph of a network of specs.with_images, made from the one without, which may have
    LoRAs and residuals. Weights and scales stay as they are."""
    model = onnx.load_model_from_string(graph)
    images = {t.name: t for t in spec.inputs if t.name.startswith((IMAGE_KEYS, IMAGE_MASK))}
    writer = _ImageWriter(np.dtype(spec.outputs[0].dtype))
    writer.begin()
    attended = 0
    for node in model.graph.node:
        writer.nodes.append(node)
        keys = IMAGE_KEYS + (node.input[1] if node.op_type == ATTENTION else "")
        if keys in images:
            writer.attend(node, images[keys].dims[-1])
            attended += 1
    if 2 * attended + 1 != len(images):
        found = f"found {attended} places for {len(images) // 2} layers"
        raise ImageGraphError(f"{spec.name}: {found}; export again")
    nodes = list(writer.nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(writer.constants.values())
    model.graph.input.extend(map(graph_input, images.values()))
    model.graph.name = spec.name
    return model.SerializeToString(deterministic=True)


@dataclass
class _ImageWriter:
    dtype: np.dtype[np.generic]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict)

    def begin(self) -> None:
        """Compute what all layers share."""
        self.mask = self.add("Unsqueeze", IMAGE_MASK, self.numbers(2, 3))

    def attend(self, node: onnx.NodeProto, width: int | str) -> None:
        """Add the attention to each image prompt to the node's result."""
        assert isinstance(width, int)
        (heads,) = (a.i for a in node.attribute if a.name == HEADS)
        query, keys, values = (node.input[0], *(IMAGE_KEYS + name for name in node.input[1:3]))
        result = node.output[0]
        node.output[0] = text = f"{result}{ENDING}"
        scaled = self.add("Mul", query, self.number((width // heads) ** -0.5))
        query = self.add("Reshape", scaled, self.numbers(0, 0, heads, -1))
        query = self.add("Transpose", query, perm=(0, 2, 1, 3))
        query = self.add("Unsqueeze", query, self.numbers(1))
        split = self.numbers(0, 0, 0, heads, -1)
        keys = self.add("Transpose", self.add("Reshape", keys, split), perm=(0, 1, 3, 4, 2))
        values = self.add("Transpose", self.add("Reshape", values, split), perm=(0, 1, 3, 2, 4))
        scores = self.add("Add", self.add("MatMul", query, keys), self.mask)
        each = self.add("MatMul", self.add("Softmax", scores, axis=-1), values)
        added = self.add("ReduceSum", each, self.numbers(1), keepdims=0)
        added = self.add("Transpose", added, perm=(0, 2, 1, 3))
        added = self.add("Reshape", added, self.numbers(0, 0, -1))
        self.add("Add", text, added, output=result)

    def add(
        self, operator: str, *inputs: str, output: str = "", **attributes: int | Sequence[int]
    ) -> str:
        output = output or f"images.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], output, **attributes))
        return output

    def numbers(self, *values: int) -> str:
        return self._constant(np.array(values, np.int64))

    def number(self, value: float) -> str:
        return self._constant(np.array(value, self.dtype))

    def _constant(self, value: np.ndarray) -> str:
        name = f"images.constant_{value.tolist()}"
        self.constants[name] = numpy_helper.from_array(value, name)
        return name
