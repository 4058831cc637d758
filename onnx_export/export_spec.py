"""What one export makes, and how its calibration paints. It makes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sdxl.checkpoint import MINI, Checkpoint
from sdxl.specs import Cut, ModelSpec, network_specs

if TYPE_CHECKING:
    from engines.lora import LoraFile

NEGATIVE_PROMPT = "normal quality, low quality, worst quality, low res, blurry, nsfw, nude"
GUIDANCE = 8.0
CACHE_INTERVAL = 2
"""the default of a request"""


@dataclass(frozen=True)
class CalibrationSettings:
    """What calibration pictures are made with. Guidance and negative prompt are those of MLPerf
    Inference's task (text to image), which the service's pictures come near to."""

    guidance: float = GUIDANCE
    negative_prompt: str = NEGATIVE_PROMPT
    cache_interval: int = CACHE_INTERVAL
    """Shallow steps read the last deep step's features, as in service: errors of the cache and of 8
    bits add up to more than their sum (CacheQuant, arXiv:2503.01323)."""
    side: int | None = None
    """in pixels; None: the model's own"""


EMBEDDED = CalibrationSettings(guidance=5.0, negative_prompt="")
"""The embedded model knows scenes, but no words about quality."""


def usual_settings(checkpoint: Checkpoint) -> CalibrationSettings:
    return EMBEDDED if checkpoint.folder == MINI else CalibrationSettings()


@dataclass(frozen=True)
class ExportSpec:
    """What one export makes, and where."""

    checkpoint: Checkpoint
    precision: str
    out: Path
    cut: Cut = "reference"
    loras: tuple[LoraFile, ...] = ()
    prompts: tuple[str, ...] = ()
    """for calibration"""
    calibration: CalibrationSettings | None = None
    """None: the model's usual settings"""
    is_forced: bool = False

    @property
    def settings(self) -> CalibrationSettings:
        return self.calibration or usual_settings(self.checkpoint)

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """The networks' tensors; 8-bit UNets compute other layers in halves."""
        dtype = "float32" if self.precision == "fp32" else "float16"
        return network_specs(self.checkpoint.arch, dtype, self.cut)
