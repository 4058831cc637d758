"""How much work an image is, in standard images: one of the model's own size with default steps,
cache interval and guidance.

A count of arithmetic that needs no measurement, so that a limit means the same on every machine.
Replicas share their time by measured seconds instead (admission.py).
"""

from __future__ import annotations

from sdxl.controls import windows_of
from sdxl.cost import CONTROL_SHARE, SHALLOW_SHARE
from sdxl.deepcache import StepPlan, plan_of
from sdxl.params import GenerationParams, Sizes

PASTE_SHARE = 0.1
"""Pasting into an image and writing its file, as a share of the work of generating an image of that
size."""


def standard_images(
    params: GenerationParams, sizes: Sizes, *, embeds_guidance: bool = False, pasted: int = 0
) -> float:
    """`pasted`: pixels of the files of a larger image that the picture is pasted into."""
    side = sizes.default

    def work(each: GenerationParams) -> float:
        plan = plan_of(each, embeds_guidance=embeds_guidance)
        return _pixels(each, side) * (_row_steps(plan) + _control_steps(plan, each))

    made = sum(map(work, params.legs)) / work(GenerationParams(width=side, height=side))
    return made + PASTE_SHARE * pasted / side**2


def _pixels(params: GenerationParams, side: int) -> int:
    return (params.width or side) * (params.height or side)


def _row_steps(plan: StepPlan) -> float:
    """Deep steps of one row, shallow ones as the part of one that they are."""
    return plan.rows(is_deep=True) + plan.rows(is_deep=False) * SHALLOW_SHARE


def _control_steps(plan: StepPlan, params: GenerationParams) -> float:
    """Deep steps of one row that ControlNets' calls take as long as."""
    rows = (
        window.rows(step.rows)
        for window in windows_of(params.controls or ())
        for number, step in enumerate(plan)
        if step.is_deep and not step.is_refined and window.covers(number, len(plan))
    )
    return CONTROL_SHARE * sum(rows)
