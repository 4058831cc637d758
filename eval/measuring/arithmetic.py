"""The arithmetic and the minimum memory traffic of a network's call, from its modules and its spec.

Modules are built on the meta device from a checkpoint's configs, without weights. The bytes count
every weight, input and output once. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from onnx_export.random_weights import SDXL_1_0
from onnx_export.recipes import RECIPES
from sdxl.checkpoint import NETWORK_FOLDERS, find
from sdxl.checkpoint_checks import network_class
from sdxl.engine import torch_dtype
from sdxl.networks.parts import networks_of
from sdxl.specs import CHUNK, Architecture, ModelSpec, image_axes, network_specs

FULL_SIZE = "sdxl-1.0"
"""the name of the full-size model without weights"""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

Configs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class CallWork:
    """The work of one call."""

    flops: float
    weight_bytes: float
    tensor_bytes: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.tensor_bytes


@dataclass(frozen=True)
class Shapes:
    """The size of a call: the images' side in pixels, and the rows of a UNet's call."""

    side: int
    rows: int

    def axes(self, arch: Architecture) -> dict[str, int]:
        latent = self.side // arch.vae_scale
        axes = {"rows": self.rows, "batch": self.rows // 2, "chunks": self.rows, "tokens": CHUNK}
        axes |= {"latent_h": latent, "latent_w": latent}
        return axes | image_axes(arch, latent, latent)


def configs_of(model: str) -> Configs:
    if model == FULL_SIZE:
        return SDXL_1_0
    checkpoint = find(model)
    return {part: checkpoint.config(part) for part in NETWORK_FOLDERS}


def architecture_of(configs: Configs) -> Architecture:
    parts = ("unet", "vae", "text_encoder", "text_encoder_2")
    return Architecture.from_configs(*(configs[part] for part in parts))


def work_of(configs: Configs, shapes: Shapes, precision: str) -> dict[str, CallWork]:
    """The work of every network, by name."""
    arch = architecture_of(configs)
    specs = network_specs(arch, DTYPES.get(precision, "float16"))
    return {
        name: _work(network, specs[name], shapes.axes(arch), precision)
        for name, network in meta_networks(configs)
    }


def calls_a_picture(deep: int, shallow: int) -> dict[str, int]:
    """The number of calls of every network for one picture with these steps."""
    steps = {"unet_prompt": 1, "unet_deep": deep, "unet_shallow": shallow}
    return {**steps, "vae_decoder": 1, "clip_l": 1, "clip_g": 1}


def meta_networks(configs: Configs) -> Iterator[tuple[str, nn.Module]]:
    """The networks by name, on the meta device."""
    with torch.device("meta"):
        for part in NETWORK_FOLDERS:
            yield from networks_of(part, build_module(part, configs[part])).items()


def build_module(part: str, config: Mapping[str, Any]) -> nn.Module:
    kind = network_class(part)
    if part.startswith("text_encoder"):
        module: nn.Module = kind(kind.config_class(**config))
    else:
        module = kind.from_config(dict(config))
    return module.eval().requires_grad_(False)


def _work(network: nn.Module, spec: ModelSpec, axes: Mapping[str, int], precision: str) -> CallWork:
    inputs = [
        torch.empty(t.shape(axes), dtype=_module_dtype(t.dtype), device="meta") for t in spec.inputs
    ]
    with FlopCounterMode(display=False) as counter, torch.no_grad(), _called(network) as called:
        network(*inputs)
    tensors = sum(torch_dtype(t).itemsize * prod(t.shape(axes)) for t in spec.tensors)
    weights = _weight_bytes(called, spec, precision)
    return CallWork(float(counter.get_total_flops()), weights, float(tensors))


def _module_dtype(dtype: str) -> torch.dtype:
    """The type of an input: modules are float32, because their width does not change the FLOPs."""
    return torch.int64 if dtype == "int64" else torch.float32


@contextmanager
def _called(network: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Yield the layers that run, by name. A network may hold layers that do not run."""
    called: dict[str, nn.Module] = {}
    hooks = [
        module.register_forward_pre_hook(lambda m, _, name=name: called.update({name: m}))
        for name, module in network.named_modules()
        if next(module.children(), None) is None
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def _weight_bytes(layers: Mapping[str, nn.Module], spec: ModelSpec, precision: str) -> float:
    """The fewest bytes of the weights: in 8 bits every matrix of a step's network has one byte."""
    usual = torch_dtype(spec.outputs[0]).itemsize
    matrix = 1 if precision in RECIPES and spec.name in ("unet_deep", "unet_shallow") else usual
    weights = [p for each in layers.values() for p in each.parameters()]
    return float(sum(p.numel() * (matrix if p.dim() > 1 else usual) for p in weights))
