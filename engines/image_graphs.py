"""ONNX graphs that attend to image prompts. They are made from a UNet's graphs, so every export has
them.

sdxl/networks/attention.py does the same to a module. It knows no runtime.
"""

from __future__ import annotations

import numpy as np
import onnx

from engines.lora_graphs import NodeWriter, graph_input
from sdxl.specs import IMAGE_KEYS, IMAGE_MASK, ModelSpec

ATTENTION, HEADS = "Attention", "q_num_heads"
ENDING = ".text"
"""the end of the names of results of attention to the text alone"""


class ImageGraphError(RuntimeError):
    """A graph lacks attention to the text."""


def add_images(graph: bytes, spec: ModelSpec) -> bytes:
    """Return the graph of a network of specs.with_images, made from the `graph` without images,
    which may have LoRAs and residuals. Weights and scales do not change."""
    model = onnx.load_model_from_string(graph)
    images = {t.name: t for t in spec.inputs if t.name.startswith((IMAGE_KEYS, IMAGE_MASK))}
    writer = _ImageWriter(spec.outputs[0].dtype)
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
    del model.graph.node[:]
    model.graph.node.extend(writer.nodes)
    model.graph.initializer.extend(writer.constants.values())
    model.graph.input.extend(map(graph_input, images.values()))
    model.graph.name = spec.name
    return model.SerializeToString(deterministic=True)


class _ImageWriter(NodeWriter):
    def __init__(self, dtype: str) -> None:
        super().__init__("images")
        self.dtype = dtype
        self.mask = self.add("Unsqueeze", IMAGE_MASK, self.numbers(2, 3))

    def attend(self, node: onnx.NodeProto, width: int | str) -> None:
        """Add the attention to each image prompt to the node's result."""
        assert isinstance(width, int)
        (heads,) = (a.i for a in node.attribute if a.name == HEADS)
        query, keys, values = (node.input[0], *(IMAGE_KEYS + name for name in node.input[1:3]))
        result = node.output[0]
        node.output[0] = text = f"{result}{ENDING}"
        scale = self.constant(np.array((width // heads) ** -0.5, self.dtype))
        scaled = self.add("Mul", query, scale)
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
