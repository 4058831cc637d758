"""SDXL's full-size networks on the meta device, in the torch backend's GPU form (rearranged, 8
bits). They need no weights and no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from engines.bank_shelf import new_bank
from engines.folders.export_folder import INPUT_SCALE, SCALE, SMOOTHING, WEIGHT
from engines.low_rank import Bank, adapt, bank_specs
from engines.pytorch.eight_bit import flagged, put_decoder_layers, put_layers
from engines.pytorch.fast_unet import rearrange
from engines.pytorch.fast_vae import rearrange_decoder
from engines.pytorch.launches import meta_inputs
from eval.measuring.arithmetic import FULL_SIZE, architecture_of, build_module, configs_of
from onnx_export.recipes import RECIPES
from sdxl.networks.attention import cross_attentions
from sdxl.networks.control import net_like
from sdxl.networks.parts import networks_of
from sdxl.specs import CHUNK, ControlArchitecture, control_specs, level_axes, network_specs

NUMBERS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
PRECISIONS = ("fp16", *NUMBERS)
UNETS = ("unet_deep", "unet_shallow")
CONTROL = "control_deep"


@cache
def unets(precision: str, model: str = FULL_SIZE) -> Mapping[str, nn.Module]:
    """The UNet's networks in the torch backend's GPU form."""
    with torch.device("meta"):
        unet = half_unet(model)
        adapt("unet", unet)
        if precision in NUMBERS:
            put_layers(unet, dict(numbers_of(unet, precision)))
        rearrange(unet)
        networks = networks_of("unet", unet, "reference")
        return {name: flagged(network) for name, network in networks.items()}


def half_unet(model: str = FULL_SIZE) -> Any:
    unet: Any = build_module("unet", configs_of(model)["unet"])
    # The model's own `to` prints irrelevant warnings.
    return nn.Module.to(unet, torch.float16).to(memory_format=torch.channels_last)


@cache
def control_net(precision: str = "fp16") -> Any:
    """A ControlNet like the UNet's way down, in FP8 if `precision` has 8 bits."""
    with torch.device("meta"):
        net = net_like(half_unet(), "float16")
        if precision in NUMBERS:
            put_layers(net, dict(numbers_of(net, "fp8")))
        rearrange(net)
        return net


@cache
def bank() -> Bank:
    """The bank of the UNet's LoRAs."""
    with torch.device("meta"):
        shapes = adapt("unet", half_unet())
    return new_bank(bank_specs(shapes, "float16"), torch.device("meta"))


def numbers_of(unet: nn.Module, precision: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an export for the layers that the recipe quantises, without values."""
    for name, layer in unet.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        rule = RECIPES[precision].own_rule_for(name)
        if rule.is_quantised:
            out, inside = layer.weight.shape[:2]
            yield name + WEIGHT, torch.empty(layer.weight.shape, dtype=NUMBERS[precision])
            yield name + SCALE, torch.empty(out)
            yield name + INPUT_SCALE, torch.empty(())
            if rule.smoothing is not None:
                yield name + SMOOTHING, torch.empty(inside)


@cache
def decoder(precision: str = "fp16", model: str = FULL_SIZE) -> nn.Module:
    """The decoder in the torch backend's GPU form."""
    with torch.device("meta"):
        vae = networks_of("vae", build_module("vae", configs_of(model)["vae"]))
        network = vae["vae_decoder"].to(torch.float16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if precision in NUMBERS:
            put_decoder_layers(network.decoder)
        rearrange_decoder(network.decoder)
        return network


def inputs_of(name: str, rows: int, side: int) -> list[Tensor]:
    """The fp16 inputs of a call at this size in pixels."""
    arch = architecture_of(configs_of(FULL_SIZE))
    latent = side // arch.vae_scale
    axes = {"rows": rows, "tokens": CHUNK, **level_axes(latent, latent)}
    if name != CONTROL:
        return meta_inputs(network_specs(arch, "float16")[name], axes)
    widths = tuple(each.to_k.out_features for each in cross_attentions(control_net()))
    return meta_inputs(control_specs(arch, ControlArchitecture(widths), "float16")[name], axes)


def latents_of(images: int, latent: int) -> Tensor:
    return torch.empty(images, 4, latent, latent, dtype=torch.float16, device="meta")
