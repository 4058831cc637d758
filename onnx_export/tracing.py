"""Traces a torch network to an ONNX graph without the values of weights.

Names, dims, dynamic axes and example inputs come from the ModelSpec. Parameters have no values when
constants are folded, so the graph depends only on the network's shape.

Two of PyTorch's operators are translated to few nodes, in an order that backends can fuse. torch's
translation of attention computes the number of axes at run time, though SDXL's keys always have
four. Its group norm is one node, which ONNX Runtime has no kernel for and expands to ten.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from onnxscript import opset23 as op
from onnxscript import optimizer, rewriter
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention
from torch import Tensor, nn

from sdxl.engine import torch_dtype
from sdxl.specs import ModelSpec

OPSET = 23
PREFIX = "network."
ONNX_NAMES = {"float32": "float", "float16": "float16", "int64": "int64"}


class TraceError(RuntimeError):
    """A network's graph differs from its spec."""


class PositionalNetwork(nn.Module):
    """Passes a spec's inputs by position, since the network's names may differ."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *tensors: Tensor) -> Any:
        return self.network(*tensors)


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Translate softmax(query · keyᵀ · scale) · value; all are [rows, heads, positions, width]."""
    if attn_mask is not None or is_causal:
        return aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # Scaled before the product, which could overflow in half precision.
    scaled = op.Mul(query, op.CastLike(op.Constant(value_float=factor), query))
    scores = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
    return op.MatMul(op.Softmax(scores, axis=-1), value)


def group_norm(
    x: Any, groups: int, weight: Any, bias: Any, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    """Translate to an instance norm with groups as channels, and a batch norm with mean 0 and
    variance 1, which applies weight and bias in one pass."""
    rows_of_groups = op.Reshape(x, op.Constant(value_ints=[0, groups, -1]))
    normed = op.InstanceNormalization(
        rows_of_groups, _filled(1.0, groups, x), _filled(0.0, groups, x), epsilon=eps
    )
    channels = x.shape[1]
    mean, variance = _filled(0.0, channels, x), _filled(1.0, channels, x)
    normed = op.Reshape(normed, op.Shape(x))
    return op.BatchNormalization(normed, weight, bias, mean, variance, epsilon=0.0)


def _filled(value: float, count: int, like: Any) -> Any:
    return op.CastLike(op.Constant(value_floats=[value] * count), like)


TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: attention,
    torch.ops.aten.group_norm.default: group_norm,
}


def trace(spec: ModelSpec, network: nn.Module) -> ir.Model:
    """Trace a network. Its parameters become initialisers with their names and without values."""
    axes = example_axes(spec)
    inputs = tuple(torch.ones(t.shape(axes), dtype=torch_dtype(t)) for t in spec.inputs)
    dims = {name: torch.export.Dim(name) for name in axes}
    free = tuple({i: dims[name] for i, name in t.free_axes.items()} for t in spec.inputs)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            PositionalNetwork(network),
            inputs,
            dynamo=True,
            optimize=False,
            opset_version=OPSET,
            dynamic_shapes=(free,),
            input_names=[t.name for t in spec.inputs],
            output_names=[t.name for t in spec.outputs],
            custom_translation_table=dict(TRANSLATIONS),
            verbose=False,
        )
        assert program is not None
        model: ir.Model = program.model
        _strip_values(model, network)
        _fold(model)
    _name(model, spec)
    return model


def example_axes(spec: ModelSpec) -> dict[str, int]:
    """Return a different size for each free axis, so that none is mistaken for another."""
    names = dict.fromkeys(name for t in spec.inputs for name in t.free_axes.values())
    return {name: 8 * (i + 2) for i, name in enumerate(names)}


def _strip_values(model: ir.Model, network: nn.Module) -> None:
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    for value in list(model.graph.initializers.values()):
        name = (value.name or "").removeprefix(PREFIX)
        if name in parameters:
            value.const_value = None
            value.name = name


def _fold(model: ir.Model) -> None:
    """Fold the nodes that do not depend on inputs or weights. Transposes of weights stay; runtimes
    compute them once at load."""
    for _ in range(2):
        optimizer.fold_constants_ir(model, onnx_shape_inference=True)
        rewriter.rewrite(model)
        passes.RemoveUnusedNodesPass()(model)
    ir.passes.Sequential(
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)


def _name(model: ir.Model, spec: ModelSpec) -> None:
    """Check and name inputs and outputs by the spec; remove files, lines and versions."""
    graph = model.graph
    for values, tensors in ((graph.inputs, spec.inputs), (graph.outputs, spec.outputs)):
        for value, tensor in zip(values, tensors, strict=True):
            dtype, dims = str(value.dtype).lower(), len(value.shape or ())
            traced = value.name, dtype, dims
            if traced != (tensor.name, ONNX_NAMES[tensor.dtype], len(tensor.dims)):
                raise TraceError(
                    f"{spec.name}: {value.name!r} became {dtype} with {dims} dims, "
                    f"expected {tensor.name!r}, {tensor.dtype}{tensor.dims}"
                )
            value.shape = ir.Shape(tensor.dims)
    model.producer_name, model.producer_version = "sdxl-deepcache", None
    graph.name = spec.name
    kept = {*graph.inputs, *graph.outputs}
    model.metadata_props.clear()
    graph.metadata_props.clear()
    for node in graph.all_nodes():
        node.doc_string = None
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
            if value not in kept:
                value.shape = value.type = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings about shared axes and weights without values, which are intended, and about
    packages that SDXL does not need."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
