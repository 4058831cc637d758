"""The numbers of an 8-bit UNet from plain absolute maxima, on any device, without Model Optimizer.

For FP8 that is the recipe itself. For INT8 it leaves out SmoothQuant and the least of the steps'
means: good for measuring speed, not for pictures. It does not know where calibration data come
from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from onnx_export.quantisation import stored_numbers
from onnx_export.recipes import Recipe, matching
from sdxl.files import grant_usual


def write_numbers(
    unet: nn.Module, recipe: Recipe, run: Callable[[], object], path: Path
) -> tuple[str, ...]:
    """`run` sends calibration data through the UNet; the names of the layers that `path` holds."""
    layers = {n: m for n, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    chosen = [name for name, rule in matching(recipe, layers).items() if rule.is_quantised]
    maxima: dict[str, Tensor] = {}
    hooks = [layers[n].register_forward_pre_hook(partial(_collect, maxima, n)) for n in chosen]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    tensors: dict[str, Tensor] = {}
    for name in chosen:
        weight: Any = layers[name].weight
        per_channel = weight.flatten(1).abs().amax(1)
        tensors |= stored_numbers(name, weight, per_channel, maxima[name], recipe, torch.float16)
    save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, path)
    grant_usual(path)
    return tuple(chosen)


def _collect(
    maxima: dict[str, Tensor], name: str, _: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    found = inputs[0].detach().abs().amax()
    maxima[name] = torch.maximum(maxima[name], found) if name in maxima else found
