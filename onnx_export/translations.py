"""Translates two of PyTorch's operators to few ONNX nodes, in an order that backends can fuse.

torch's translation of attention computes the number of axes at run time, though SDXL's keys always
have four. Its group norm is one node, which ONNX Runtime has no kernel for and expands to ten. It
knows nothing of networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from onnxscript import opset23 as op
from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention


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
