"""The reference of an export's check: the same networks in torch, in float32.

The reference of a quantised graph applies the stored numbers of 8 bits with independent code, so
that an error in the graph shows. It knows no ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from engines.folders.export_folder import INPUT_SCALE, SCALE, SMOOTHING, WEIGHT
from engines.pytorch.torch_engine import TorchEngine
from sdxl.checkpoint import Checkpoint
from sdxl.engine import Engine, Engines
from sdxl.networks.parts import networks_of
from sdxl.specs import Cut, network_specs


def torch_engines(
    checkpoint: Checkpoint, parts: Mapping[str, nn.Module], cut: Cut = "reference"
) -> Engines:
    """Return the engines of these parts."""
    specs = network_specs(checkpoint.arch, cut=cut)
    engines: dict[str, Engine] = {
        name: TorchEngine(specs[name], network)
        for part, module in parts.items()
        for name, network in networks_of(part, module, cut).items()
    }
    device = next(next(iter(parts.values())).parameters()).device
    return Engines(checkpoint.arch, engines, device=device, cut=cut)


def fake_quantise(unet: nn.Module, file: Path) -> None:
    """Round the layers' weights and inputs as the file's numbers do."""
    tensors = load_file(file)
    for name in [key.removesuffix(INPUT_SCALE) for key in tensors if key.endswith(INPUT_SCALE)]:
        layer: Any = unet.get_submodule(name)
        stored, scale = tensors[name + WEIGHT], tensors[name + SCALE].float()
        layer.weight.data = stored.float() * scale.view(-1, *[1] * (stored.dim() - 1))
        factors = tensors.get(name + SMOOTHING)
        hook = _rounding(tensors[name + INPUT_SCALE].float(), stored.dtype, factors)
        layer.register_forward_pre_hook(hook)


def _rounding(
    scale: Tensor, dtype: torch.dtype, factors: Tensor | None
) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    def apply(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        value = inputs[0] if factors is None else inputs[0] * factors.float()
        steps = value / scale
        if dtype == torch.int8:
            return (steps.round().clamp(-128, 127) * scale,)
        largest = torch.finfo(dtype).max
        return (steps.clamp(-largest, largest).to(dtype).float() * scale,)

    return apply
