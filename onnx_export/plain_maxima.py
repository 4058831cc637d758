"""The numbers of an 8-bit UNet from plain absolute maxima, on any device, without Model Optimizer.

For FP8 that is the recipe itself. For INT8 it leaves out SmoothQuant and the least of the steps'
means: good for measuring speed, not for pictures. It does not know where calibration data come
from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from onnx_export.input_maxima import watched
from onnx_export.quantisation import stored_numbers
from onnx_export.recipes import Recipe
from sdxl.files import grant_usual


def write_numbers(
    unet: nn.Module, recipe: Recipe, run: Callable[[], object], path: Path
) -> tuple[str, ...]:
    """`run` sends calibration data through the UNet; the names of the layers that `path` holds."""
    layers = {n: m for n, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    chosen = {n: m for n, m in layers.items() if recipe.own_rule_for(n).is_quantised}
    with watched(chosen) as maxima:
        run()
    tensors = numbers_of(chosen, maxima, recipe, torch.float16)
    save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, path)
    grant_usual(path)
    return tuple(chosen)


def numbers_of(
    layers: Mapping[str, nn.Module],
    maxima: Mapping[str, Tensor],
    recipe: Recipe,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """`maxima`: of their inputs; `dtype`: of the scales."""
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        weight: Any = layer.weight
        per_channel = weight.flatten(1).abs().amax(1)
        tensors |= stored_numbers(name, weight, per_channel, maxima[name], recipe, dtype)
    return tensors
