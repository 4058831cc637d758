"""How our kernels round to 8 bits: what is too large becomes the largest, and what is not a number
stays visible. FP8 has a value for it, and of an int8 tensor the row's flag becomes NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HALF_STEP = tl.constexpr(12582912.0)
"""1.5 × 2^23: adding and subtracting it rounds a float32 to the nearest whole number, halves to
even"""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@triton.jit
def limited(value, largest):
    value = tl.maximum(value, -largest, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def store_steps(out, value, mask, largest):
    """The nearest numbers of the 8 bits; of an int8 tensor somebody else has looked for NaN."""
    dtype: tl.constexpr = out.dtype.element_ty
    value = limited(value, largest)
    if dtype == tl.int8:
        # The nearest whole number is in the lowest bits of the sum.
        tl.store(out, (value + HALF_STEP).to(tl.int32, bitcast=True).to(tl.int8), mask=mask)
    else:
        tl.store(out, value.to(dtype), mask=mask)


@triton.jit
def store_rounded(out, flag, value, mask, largest):
    """`flag`, of the row, becomes NaN where there is one: int8 has no value for it."""
    dtype: tl.constexpr = out.dtype.element_ty
    if dtype == tl.int8:
        broken = mask & (value != value)
        tl.store(flag + tl.zeros_like(value).to(tl.int32), value, mask=broken)
        value = tl.where(broken, 0.0, value)
    value = limited(value, largest)
    if dtype == tl.int8:
        value = (value + HALF_STEP) - HALF_STEP
    tl.store(out, value.to(dtype), mask=mask)


@triton.jit
def store_rounded_lines(out, flags, value, mask, largest):
    """Of a tile, a flag for each of its lines, in fewer operations a value: where a line's sum is
    not a number, something in it is none. A value that is masked off is to be a number."""
    if out.dtype.element_ty == tl.int8:
        total = tl.sum(limited(value, largest), 1)
        tl.store(flags, total, mask=(total != total) & (tl.max(mask.to(tl.int32), 1) > 0))
    store_steps(out, value, mask, largest)
