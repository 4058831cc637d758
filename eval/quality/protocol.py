"""MLPerf Inference's text-to-image task with Stable Diffusion XL, as data.

From the benchmark's rules and its reference implementation (mlcommons/inference, text_to_image,
v4.0 to v5.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx_export.export_spec import GUIDANCE, NEGATIVE_PROMPT
from sdxl.params import GenerationParams


@dataclass(frozen=True)
class ScoreRange:
    """The closed division's range of a score."""

    low: float
    high: float

    def holds(self, score: float) -> bool:
        return self.low <= score <= self.high


CLIP_GATE = ScoreRange(31.68631873, 31.81331801)
FID_GATE = ScoreRange(23.01085758, 23.95007626)
CLIP_TOLERANCE, FID_TOLERANCE = 0.002, 0.02
"""the same gates as shares of the exact model's scores, to measure any other model"""

CAPTIONS = 5000
"""of COCO 2014's validation set, one picture each"""
REQUEST = GenerationParams(
    negative_prompt=NEGATIVE_PROMPT,
    width=1024,
    height=1024,
    steps=20,
    guidance=GUIDANCE,
    seed=0,
    scheduler="euler",
    cache_interval=1,
)
"""Every picture starts from the noise of seed 0: randn(1, 4, 128, 128) in float32 on the CPU."""
SCHEDULER: Mapping[str, Any] = {
    "timestep_spacing": "leading",
    "steps_offset": 1,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "prediction_type": "epsilon",
}
"""the required values in the checkpoint's scheduler_config.json"""
INCEPTION_WIDTH = 2048
