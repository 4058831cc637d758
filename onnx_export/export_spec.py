"""Describes an export, and the pictures of its calibration."""

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
    """The parameters of calibration pictures. Guidance and negative prompt are those of MLPerf
    Inference's text-to-image task, which the service's pictures resemble."""

    guidance: float = GUIDANCE
    negative_prompt: str = NEGATIVE_PROMPT
    cache_interval: int = CACHE_INTERVAL
    """The interval of the served pictures. Errors of the cache and of 8 bits are together larger
    than their sum (CacheQuant, arXiv:2503.01323)."""
    side: int | None = None
    """in pixels; None: the model's own"""


EMBEDDED = CalibrationSettings(guidance=5.0, negative_prompt="")
"""The embedded model does not know words about quality."""


def usual_settings(checkpoint: Checkpoint) -> CalibrationSettings:
    return EMBEDDED if checkpoint.folder == MINI else CalibrationSettings()


@dataclass(frozen=True)
class ExportSpec:
    """One export."""

    checkpoint: Checkpoint
    precision: str
    out: Path
    cut: Cut = "reference"
    loras: tuple[LoraFile, ...] = ()
    prompts: tuple[str, ...] = ()
    """prompts of the calibration"""
    calibration: CalibrationSettings | None = None
    """None: the model's usual settings"""
    is_forced: bool = False

    @property
    def settings(self) -> CalibrationSettings:
        return self.calibration or usual_settings(self.checkpoint)

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """The networks' tensors. Layers of 8-bit UNets that are not quantised are float16."""
        dtype = "float32" if self.precision == "fp32" else "float16"
        return network_specs(self.checkpoint.arch, dtype, self.cut)
