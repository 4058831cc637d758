"""What one export is to make, and where. It makes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.lora import Lora
from onnx_export.settings import CalibrationSettings, usual_settings
from sdxl.checkpoint import Checkpoint
from sdxl.specs import Cut, ModelSpec, network_specs


@dataclass(frozen=True)
class ExportSpec:
    """What is exported, to where."""

    checkpoint: Checkpoint
    precision: str
    out: Path
    cut: Cut = "reference"
    loras: tuple[Lora, ...] = ()
    prompts: tuple[str, ...] = ()
    """for calibration"""
    calibration: CalibrationSettings | None = None
    """None: as is usual for the model"""
    is_forced: bool = False

    @property
    def settings(self) -> CalibrationSettings:
        return self.calibration or usual_settings(self.checkpoint)

    @property
    def specs(self) -> dict[str, ModelSpec]:
        """8-bit UNets compute in halves where they are not quantised."""
        dtype = "float32" if self.precision == "fp32" else "float16"
        return network_specs(self.checkpoint.arch, dtype, self.cut)
