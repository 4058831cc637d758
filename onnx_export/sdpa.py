"""Attention as ONNX nodes: the few that it needs, in the order that backends fuse.

The exporter's own translation finds out at run time how many axes the keys have, before it swaps
the last two. SDXL's always have four. It knows nothing of what attends to what.
"""

from __future__ import annotations

import math
from typing import Any

from onnxscript import opset20 as op
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
    """softmax(query · keyᵀ · scale) · value, [rows, heads, positions, width] each."""
    if attn_mask is not None or is_causal:
        return aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    # Scaled before the product, so that halves do not overflow in it.
    scaled = op.Mul(query, op.CastLike(op.Constant(value_float=factor), query))
    scores = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))
    return op.MatMul(op.Softmax(scores, axis=-1), value)
