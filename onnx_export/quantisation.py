"""Calibrates a UNet with NVIDIA's Model Optimizer by a recipe, and takes out what a graph needs.

The module is left fake-quantised: the reference that the graphs are checked against. It does not
know where calibration data come from, nor ONNX.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.folders.export_folder import INPUT_SCALE, SCALE, SMOOTHING, WEIGHT
from onnx_export.calibration import StepClock
from onnx_export.channel_limits import limit_calibrator
from onnx_export.mean_calibrator import mean_calibrator
from onnx_export.recipes import Recipe, Rule, matching

BITS: dict[str, int | tuple[int, int]] = {"int8": 8, "fp8": (4, 3)}
LARGEST = {"int8": 127.0, "fp8": 448.0}
SMALLEST_SCALE = 2.0**-24
"""what a half can still hold"""


@dataclass(frozen=True)
class LayerReport:
    """What a layer became, and why. `range` is its input's calibrated absolute maximum."""

    layer: str
    kind: str
    became: str
    why: str
    range: float | None = None
    smoothing: float | None = None


@dataclass(frozen=True)
class Quantised:
    """What is stored of the quantised layers, by name, and the report on all of them."""

    tensors: Mapping[str, Tensor]
    report: tuple[LayerReport, ...]

    def as_list(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.report]


def quantise(
    unet: nn.Module, recipe: Recipe, run: Callable[[StepClock], None], dtype: torch.dtype
) -> Quantised:
    """`run` sends calibration data through the UNet and keeps the clock; `dtype` is the graph's,
    and so the scales'."""
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
    """A line for every reason, with the number of layers it holds for."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in report:
        counts[row.became, row.kind, row.why] = counts.get((row.became, row.kind, row.why), 0) + 1
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
    clock, heard = StepClock(), sys.stdout

    def run_aloud(_: nn.Module) -> None:
        with contextlib.redirect_stdout(heard):
            run(clock)

    with _quiet():
        config = {"quant_cfg": _entries(recipe, rules, clock), "algorithm": method}
        library.quantize(unet, config, run_aloud)


def _load_library() -> Any:
    """Model Optimizer, in a thread of its own: a package that it imports keeps an exception for
    ever, and with it the frames of all that called it. They hold the UNet and the text encoders."""
    name = "modelopt.torch.quantization"
    with _quiet(), ThreadPoolExecutor(1) as thread:
        return thread.submit(importlib.import_module, name).result()


def _entries(recipe: Recipe, rules: Mapping[str, Rule], clock: StepClock) -> list[dict[str, Any]]:
    """Each quantised layer by name; weights have a scale for each output channel."""
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
    """A layer's 8-bit weight and scales, from the absolute maxima of the weight's output channels
    and of the input."""
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
    """As the graph holds it: weights are divided by the very number they are multiplied with."""
    return scale.clamp(min=SMALLEST_SCALE).to(dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """The library prints its progress, and warns of accelerators it does not find."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
