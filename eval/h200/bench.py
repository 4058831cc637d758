"""What the sections of `sdxl bench h200` share: the model, its 8-bit numbers, and pipelines by
precision, each made once. It measures nothing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from engines.pytorch.torch_engine import EIGHT_BIT, load_torch
from engines.pytorch.torch_options import PLAIN, TorchOptions
from eval.speed.variants import PROMPTS, BenchSetting, Paint, load_one
from onnx_export.calibration import StepClock, encoders_of, first_steps
from onnx_export.plain_maxima import write_numbers
from onnx_export.random_weights import write_checkpoint
from onnx_export.recipes import RECIPES
from onnx_export.settings import usual_settings
from sdxl.checkpoint import Checkpoint, find
from sdxl.parameter import USUAL_INTERVAL
from sdxl.params import GenerationParams
from sdxl.pipeline import Pipeline

BATCH = 8
"""images in flight together, two rows each"""


@dataclass
class Bench:
    """`until_s` is of time.perf_counter. A dry run has the embedded model in the full one's
    place."""

    out: Path
    until_s: float
    is_dry: bool
    chosen: Sequence[str] = ()
    """precisions; all that are measured unless given"""
    _pipelines: dict[tuple[str, str], Pipeline] = field(default_factory=dict)
    _peers: dict[str, Paint] = field(default_factory=dict)
    _parts: dict[tuple[str, str], nn.Module] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return self.until_s - time.perf_counter()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def precisions(self) -> tuple[str, ...]:
        found = ("fp32", "fp8") if self.is_dry else ("fp16", "fp8", "int8")
        return tuple(each for each in found if not self.chosen or each in self.chosen)

    @property
    def setting(self) -> BenchSetting:
        """SDXL's full size with random weights, made on the GPU at the first call."""
        if self.is_dry:
            return BenchSetting("mini", 64, steps=2)
        folder = self.out / "model"
        if not folder.exists():
            write_checkpoint(folder, device=self.device.type)
        return BenchSetting(str(folder), None)

    @property
    def usual(self) -> GenerationParams:
        setting = self.setting
        return GenerationParams(
            PROMPTS[0],
            seed=0,
            steps=setting.steps,
            width=setting.side,
            height=setting.side,
            cache_interval=USUAL_INTERVAL,
        )

    def pipeline(self, precision: str, model: str = "", options: str = "") -> Pipeline:
        """Through the backend that the service uses."""
        known = model or self.setting.model, precision
        if options or known not in self._pipelines:
            made = self._load(find(known[0]), precision, options)
            if options:
                return made
            self._pipelines[known] = made
        return self._pipelines[known]

    def warm(self, pipeline: Pipeline, images: int) -> None:
        """As a service warms up, for calls of so many: the first round pays for what happens once,
        the second records."""
        with pipeline.engines.warming():
            for _ in range(2):
                pipeline.generate([replace(self.usual, steps=4, seed=i) for i in range(images)])

    def release(self) -> None:
        """The memory of what pipelines are made of."""
        self._parts.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def peer(self, name: str) -> Paint:
        if name not in self._peers:
            self._peers[name] = load_one(self.setting, name, ())
        return self._peers[name]

    def _load(self, checkpoint: Checkpoint, precision: str, options: str) -> Pipeline:
        numbers = [self._numbers(checkpoint, precision)] if precision in EIGHT_BIT else []
        # What the others are held against is diffusers' own arithmetic.
        wanted = PLAIN if precision == "fp32" and not options else TorchOptions.parse(options)
        load_part = partial(self._copied, checkpoint)
        engines = load_torch(
            checkpoint, precision=precision, options=wanted, numbers=numbers, load_part=load_part
        )
        return Pipeline(checkpoint, engines)

    def _part(self, checkpoint: Checkpoint, name: str) -> nn.Module:
        """In float32. From the disk once: that takes longer than what is measured."""
        key = str(checkpoint.folder), name
        if key not in self._parts:
            # Not the module's own `to`, which warns of what other models need.
            self._parts[key] = nn.Module.to(checkpoint.part(name), self.device)
        return self._parts[key]

    def _copied(self, checkpoint: Checkpoint, name: str) -> nn.Module:
        return copy.deepcopy(self._part(checkpoint, name))

    def _numbers(self, checkpoint: Checkpoint, precision: str) -> Path:
        """Maxima over the recipe's steps of two pictures, in float32."""
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
