"""The work of an image in standard images: images of the model's own size with default steps, cache
interval and guidance.

It counts arithmetic and needs no measurement, so that a limit means the same on every machine.
Replicas share their time by measured seconds instead (admission.py).
"""

from __future__ import annotations

from sdxl.controls import windows_of
from sdxl.cost import CONTROL_SHARE, SHALLOW_SHARE
from sdxl.deepcache import plan_of
from sdxl.params import GenerationParams, Sizes

PASTE_SHARE = 0.1
"""work of pasting into an image and writing the file, relative to generating such an image"""


def standard_images(
    params: GenerationParams, sizes: Sizes, *, embeds_guidance: bool = False, pasted: int = 0
) -> float:
    """Return a request's work. `pasted`: pixels of the image that its pictures are pasted into."""
    side = sizes.default

    def work(leg: GenerationParams) -> float:
        plan = plan_of(leg, embeds_guidance=embeds_guidance)
        rows = plan.rows(is_deep=True) + plan.rows(is_deep=False) * SHALLOW_SHARE
        pixels = (leg.width or side) * (leg.height or side)
        nets = sum(plan.rows_in(window) for window in windows_of(leg.controls or ()))
        return pixels * (rows + nets * CONTROL_SHARE)

    images = sum(map(work, params.legs)) / work(GenerationParams(width=side, height=side))
    return images + PASTE_SHARE * pasted / side**2
