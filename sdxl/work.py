"""How much work an image is, in standard images: one of the model's own size with default steps,
cache interval and guidance.

A count of arithmetic that needs no measurement, so that a limit means the same on every machine.
Replicas share their time by measured seconds instead (admission.py).
"""

from __future__ import annotations

from sdxl.cost import SHALLOW_SHARE
from sdxl.deepcache import plan_of
from sdxl.params import GenerationParams, Sizes


def standard_images(params: GenerationParams, sizes: Sizes) -> float:
    side = sizes.default
    unit = _row_steps(GenerationParams(width=side, height=side))
    return sum(_pixels(leg, side) * _row_steps(leg) for leg in params.legs) / (unit * side**2)


def _pixels(params: GenerationParams, side: int) -> int:
    return (params.width or side) * (params.height or side)


def _row_steps(params: GenerationParams) -> float:
    """Deep steps of one row, shallow ones as the part of one that they are."""
    plan = plan_of(params)
    return plan.rows(is_deep=True) + plan.rows(is_deep=False) * SHALLOW_SHARE
