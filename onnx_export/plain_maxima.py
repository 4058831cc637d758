"""Computes the numbers of an 8-bit UNet from plain absolute maxima, without Model Optimizer.

For FP8 this is the recipe. For INT8 it omits SmoothQuant and the steps' means, so it is good for
measuring speed, not for pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from onnx_export.quantisation import stored_numbers
from onnx_export.recipes import Recipe
from sdxl.files import grant_usual


def write_numbers(
    unet: nn.Module, recipe: Recipe, run: Callable[[], object], path: Path
) -> tuple[str, ...]:
    """Write a UNet's numbers; return the quantised layers. `run` feeds it calibration data."""
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
    """Return the layers' numbers from the maxima of their inputs, with scales in `dtype`."""
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        weight: Any = layer.weight
        per_channel = weight.flatten(1).abs().amax(1)
        tensors |= stored_numbers(name, weight, per_channel, maxima[name], recipe, dtype)
    return tensors


@contextmanager
def watched(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Collect the largest absolute input of each called layer, by name."""
    maxima: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(partial(_collect, maxima, name))
        for name, layer in layers.items()
    ]
    try:
        yield maxima
    finally:
        for hook in hooks:
            hook.remove()


def _collect(
    maxima: dict[str, Tensor], name: str, _: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    largest = inputs[0].detach().abs().amax()
    maxima[name] = torch.maximum(maxima[name], largest) if name in maxima else largest
