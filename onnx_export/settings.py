"""How a calibration paints: guidance, negative prompt, cache plan, size. Data.

The guidance and the negative prompt are those of MLPerf Inference's task (text to image), which the
service's own pictures come near to.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdxl.checkpoint import MINI, Checkpoint

NEGATIVE_PROMPT = "normal quality, low quality, worst quality, low res, blurry, nsfw, nude"
GUIDANCE = 8.0
CACHE_INTERVAL = 2
"""what is served unless a request says otherwise"""


@dataclass(frozen=True)
class CalibrationSettings:
    guidance: float = GUIDANCE
    negative_prompt: str = NEGATIVE_PROMPT
    cache_interval: int = CACHE_INTERVAL
    """Steps in between read the last deep step's features, as they will when it is served: errors
    of the cache and of 8 bits add up to more than their sum (CacheQuant, arXiv:2503.01323)."""
    side: int | None = None
    """in pixels; None: the model's own"""


EMBEDDED = CalibrationSettings(guidance=5.0, negative_prompt="")
"""The embedded model knows scenes, and no word of quality."""


def usual_settings(checkpoint: Checkpoint) -> CalibrationSettings:
    return EMBEDDED if checkpoint.folder == MINI else CalibrationSettings()
