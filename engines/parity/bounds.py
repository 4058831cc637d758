"""What a figure must hold, by precision: data. It measures nothing.

A graph or a plan that computes something else is off by far more, and a wrong scale shows at its
first step; the bounds lie between that and what rounding costs (docs/log.md has the figures).
"""

from __future__ import annotations

STEP_BOUNDS = {"fp32": 0.001, "fp16": 0.02, "int8": 0.2, "fp8": 0.2}
"""of the finished picture as every step expects it, from the reference's own input in float32, as
relative L2 of latents"""
PICTURE_BOUNDS = {"fp32": 45.0, "fp16": 40.0, "int8": 20.0, "fp8": 20.0}
"""PSNR in dB of the median picture, least, beside the same course in float32. Errors grow along the
steps, and the bound is one for any course: the finding names what it was judged at."""
PLAN_BOUNDS = {**STEP_BOUNDS, "fp32": 0.01}
"""of what a plan's call gives: a GPU multiplies float32 in TF32"""
PLAN_PICTURE_BOUNDS = {**PICTURE_BOUNDS, "fp32": 40.0}
EIGHT_BIT_NETWORKS = ("unet_deep", "unet_shallow")


def plan_bound(network: str, precision: str) -> float:
    """Of an 8-bit export the other networks are in halves."""
    is_eight_bit = precision in ("int8", "fp8")
    own = "fp16" if is_eight_bit and network not in EIGHT_BIT_NETWORKS else precision
    return PLAN_BOUNDS[own]
