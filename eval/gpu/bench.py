"""What the sections of `sdxl bench gpu` share: the model, its 8-bit numbers and a pipeline for each
precision. Each is made once.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.pytorch.torch_engine import EIGHT_BIT, load_torch
from engines.pytorch.torch_options import PLAIN, TorchOptions
from eval.speed.variants import PROMPTS, BenchSetting, requests_of
from onnx_export.calibration import StepClock, encoders_of, first_steps
from onnx_export.export_spec import usual_settings
from onnx_export.plain_maxima import write_numbers
from onnx_export.random_weights import write_checkpoint
from onnx_export.recipes import RECIPES
from sdxl.checkpoint import Checkpoint, find
from sdxl.cost import Costs
from sdxl.inflight import InFlight
from sdxl.parameter import USUAL_INTERVAL
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

BATCH = 8
"""images in flight together, two rows each"""
Figures = Iterator[tuple[str, Any]]
"""a section's figures by name"""


@dataclass
class Bench:
    """`until_s` is on time.perf_counter. A dry run uses the embedded model instead of the full-size
    one."""

    out: Path
    until_s: float
    is_dry: bool
    chosen: Sequence[str] = ()
    """precisions; all if empty"""
    options: str = ""
    """of the torch backend"""
    loop: InFlight | None = None
    """the service's loop, warmed up; see mixed.py"""
    warm_costs: Costs = field(default_factory=Costs)
    """as measured by the warm-up"""
    rate_of_one_size: float | None = None
    _pipelines: dict[tuple[str, str], Pipeline] = field(default_factory=dict)
    _parts: dict[tuple[str, str], nn.Module] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return self.until_s - time.perf_counter()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def precisions(self) -> tuple[str, ...]:
        every = ("fp32", "fp8") if self.is_dry else ("fp16", "fp8", "int8")
        return tuple(each for each in every if not self.chosen or each in self.chosen)

    @property
    def served(self) -> str:
        """The precision of sections that measure only one."""
        return "fp8" if "fp8" in self.precisions and not self.is_dry else self.precisions[0]

    @property
    def setting(self) -> BenchSetting:
        """SDXL's full size with random weights, written at the first call."""
        if self.is_dry:
            return BenchSetting("mini", 64, steps=2)
        folder = self.out / "model"
        if not folder.exists():
            write_checkpoint(folder, device=self.device.type)
        return BenchSetting(str(folder), None)

    @property
    def usual(self) -> GenerationParams:
        (request,) = requests_of(self.setting, USUAL_INTERVAL, PROMPTS[:1])
        return request

    def pipeline(self, precision: str, model: str = "") -> Pipeline:
        """The pipeline of the torch backend in this precision."""
        key = model or self.setting.model, precision
        if key not in self._pipelines:
            self._pipelines[key] = self._load(find(key[0]), precision)
        return self._pipelines[key]

    def _load(self, checkpoint: Checkpoint, precision: str) -> Pipeline:
        numbers = [self._numbers(checkpoint, precision)] if precision in EIGHT_BIT else []
        # The reference has diffusers' arithmetic.
        chosen = PLAIN if precision == "fp32" else TorchOptions.parse(self.options)

        def load_part(name: str) -> nn.Module:
            return copy.deepcopy(self._part(checkpoint, name))

        given: Any = {"options": chosen, "numbers": numbers, "load_part": load_part}
        return Pipeline(checkpoint, load_torch(checkpoint, precision=precision, **given))

    def _part(self, checkpoint: Checkpoint, name: str) -> nn.Module:
        """A part in float32, read once because reading takes longer than the measurements."""
        key = str(checkpoint.folder), name
        if key not in self._parts:
            # The model's own `to` prints irrelevant warnings.
            self._parts[key] = nn.Module.to(checkpoint.part(name), self.device)
        return self._parts[key]

    def _numbers(self, checkpoint: Checkpoint, precision: str) -> Path:
        """The file of 8-bit numbers, calibrated with float32 maxima."""
        path = self.out / f"{checkpoint.name}-{precision}.safetensors"
        if not path.exists():
            names = (*encoders_of(checkpoint), "unet")
            parts = {name: self._part(checkpoint, name) for name in names}
            recipe = RECIPES[precision]
            prompts = PROMPTS[: 1 if self.is_dry else recipe.batch]
            settings = usual_settings(checkpoint)
            write_numbers(
                parts["unet"],
                recipe,
                lambda: first_steps(checkpoint, parts, prompts, recipe, settings, StepClock()),
                path,
            )
        return path
