"""Calibrates a UNet by a recipe with NVIDIA's Model Optimizer, and extracts the numbers that graphs
store. It knows no ONNX.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.folders.export_folder import INPUT_SCALE, SCALE, SMOOTHING, WEIGHT
from onnx_export.calibration import StepClock
from onnx_export.recipes import Recipe, Rule, matching

BITS: dict[str, int | tuple[int, int]] = {"int8": 8, "fp8": (4, 3)}
LARGEST = {"int8": 127.0, "fp8": 448.0}
SMALLEST_SCALE = 2.0**-24
"""the smallest half"""


@dataclass(frozen=True)
class LayerReport:
    """A layer's number type, and the reason for it."""

    layer: str
    kind: str
    became: str
    why: str
    range: float | None = None
    """calibrated absolute maximum of the input"""
    smoothing: float | None = None


@dataclass(frozen=True)
class Quantised:
    """The stored tensors of quantised layers, and the report on all layers."""

    tensors: Mapping[str, Tensor]
    report: tuple[LayerReport, ...]


def quantise(
    unet: nn.Module, recipe: Recipe, run: Callable[[StepClock], None], dtype: torch.dtype
) -> Quantised:
    """Quantise a UNet in place. `run` sends calibration data through the UNet and sets the clock;
    `dtype` is the dtype of the graph and the scales."""
    layers = {n: m for n, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    rules = matching(recipe, layers)
    before = "float16" if dtype == torch.float16 else "float32"
    _calibrate(unet, recipe, rules, run)
    tensors: dict[str, Tensor] = {}
    report = []
    for name, rule in rules.items():
        module: Any = unet.get_submodule(name)
        kind = "conv" if isinstance(module, nn.Conv2d) else "linear"
        if not rule.is_quantised:
            report.append(LayerReport(name, kind, before, rule.why))
            continue
        tensors |= _tensors(name, module, recipe, dtype)
        amax = float(module.input_quantizer.amax)
        report.append(LayerReport(name, kind, recipe.number, rule.why, amax, rule.smoothing))
    return Quantised(tensors, tuple(report))


def summary(report: tuple[LayerReport, ...]) -> str:
    """Return a line for each reason, with the number of layers."""
    counts = Counter((row.became, row.kind, row.why) for row in report)
    return "\n".join(
        f"  {count:5} {kind:6} {became:7}  {why}" for (became, kind, why), count in counts.items()
    )


def _calibrate(
    unet: nn.Module, recipe: Recipe, rules: Mapping[str, Rule], run: Callable[[StepClock], None]
) -> None:
    alphas = {rule.smoothing for rule in rules.values() if rule.smoothing is not None}
    assert len(alphas) <= 1, f"one smoothing for all layers, not {alphas}"
    method = {"method": "smoothquant", "alpha": alphas.pop()} if alphas else {"method": "max"}
    library = _load_library()
    clock, stdout = StepClock(), sys.stdout

    def run_aloud(_: nn.Module) -> None:
        with contextlib.redirect_stdout(stdout):
            run(clock)

    with _quiet():
        config = {"quant_cfg": _entries(recipe, rules, clock), "algorithm": method}
        library.quantize(unet, config, run_aloud)


def _load_library() -> Any:
    """Import Model Optimizer in another thread. A package that it imports keeps an exception for
    ever, and with it the callers' frames, which would hold the UNet and the text encoders."""
    name = "modelopt.torch.quantization"
    with _quiet(), ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()


def _entries(recipe: Recipe, rules: Mapping[str, Rule], clock: StepClock) -> list[dict[str, Any]]:
    """Return Model Optimizer's configuration; weights have a scale for each output channel."""
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    bits = BITS[recipe.number]
    for name, rule in rules.items():
        if rule.is_quantised:
            inputs: dict[str, Any] = {"num_bits": bits, "axis": None}
            if rule.statistic == "min-mean":
                inputs["calibrator"] = mean_calibrator(clock)
            if rule.smoothing is not None:
                inputs["calibrator"] = limit_calibrator(rule.headroom)
            weight = {"num_bits": bits, "axis": 0}
            entries.append({"quantizer_name": f"{name}.weight_quantizer", "cfg": weight})
            entries.append({"quantizer_name": f"{name}.input_quantizer", "cfg": inputs})
    return entries


def _tensors(name: str, layer: Any, recipe: Recipe, dtype: torch.dtype) -> dict[str, Tensor]:
    factors = layer.input_quantizer.pre_quant_scale
    maxima = layer.weight_quantizer.amax, layer.input_quantizer.amax
    tensors = stored_numbers(name, layer.weight, *maxima, recipe, dtype)
    if factors is not None:
        tensors[name + SMOOTHING] = factors.flatten().to(dtype)
    return tensors


@torch.no_grad()
def stored_numbers(
    name: str,
    weight: Tensor,
    per_channel: Tensor,
    of_input: Tensor,
    recipe: Recipe,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return a layer's 8-bit weight and scales from the maxima of output channels and input."""
    largest = LARGEST[recipe.number]
    scale = _rounded(per_channel.float().flatten() / largest, dtype)
    steps = weight.float() / scale.float().view(-1, *[1] * (weight.dim() - 1))
    if recipe.number == "int8":
        stored = steps.round().clamp(-largest, largest).to(torch.int8)
    else:
        stored = steps.clamp(-largest, largest).to(torch.float8_e4m3fn)
    input_scale = _rounded(of_input.float().reshape(()) / largest, dtype)
    return {name + WEIGHT: stored, name + SCALE: scale, name + INPUT_SCALE: input_scale}


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a scale to the dtype of the graph, since weights are divided by the stored number."""
    return scale.clamp(min=SMALLEST_SCALE).to(dtype)


def mean_calibrator(clock: StepClock) -> tuple[Any, ...]:
    """Return a Model Optimizer calibrator of the reference recipe's statistic: the mean of an
    input's absolute maxima over the calls of each denoising step, then the smallest of these means.
    An outlier in one picture or at one step does not coarsen the scale."""
    from modelopt.torch.quantization.calib import MaxCalibrator

    class MeanCalibrator(MaxCalibrator):
        def __init__(self) -> None:
            super().__init__()
            self.reset()

        def reset(self) -> None:
            self._maxima: dict[int, list[Tensor]] = defaultdict(list)

        def collect(self, x: Tensor) -> None:
            self._maxima[clock.step].append(x.detach().abs().amax())

        def compute_amax(self) -> Tensor | None:
            if not self._maxima:
                return None
            return torch.stack([torch.stack(m).mean() for m in self._maxima.values()]).min()

    return (MeanCalibrator, (), {})


def limit_calibrator(headroom: float) -> tuple[Any, ...]:
    """Return a Model Optimizer calibrator with `channel_limits`; SmoothQuant sets the axis."""
    from modelopt.torch.quantization.calib import MaxCalibrator

    class LimitCalibrator(MaxCalibrator):
        def compute_amax(self) -> Tensor | None:
            maxima = super().compute_amax()
            return None if maxima is None else channel_limits(maxima, headroom)

    return (LimitCalibrator, (), {})


def channel_limits(maxima: Tensor, headroom: float) -> Tensor:
    """Return a limit for each channel of a smoothed input: `headroom` times the larger of the
    channel's maximum and the mean maximum, and at most the largest maximum.

    SmoothQuant (arXiv:2211.10438) scales each channel so that its maximum comes near the largest. A
    channel that is seldom active has a small maximum by chance, and would be clipped when another
    prompt activates it. A channel far above the others is still scaled down."""
    return (maxima.clamp(min=maxima.mean()) * headroom).clamp(max=maxima.max())


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the library's progress, and its warnings about missing accelerators."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
