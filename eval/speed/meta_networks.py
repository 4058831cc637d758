"""SDXL's networks at full size on the meta device, in the torch backend's GPU form (rearranged, 8
bits), and the kernels of ours that a call launches. It needs no weights and no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from engines.folders.export_folder import INPUT_SCALE, SCALE, SMOOTHING, WEIGHT
from engines.folders.profiles import buckets
from engines.folders.targets import TARGETS
from engines.pytorch.eight_bit import flagged, put_decoder_layers, put_layers
from engines.pytorch.fast_unet import rearrange
from engines.pytorch.fast_vae import rearrange_decoder
from engines.pytorch.launches import Launch, meta_inputs, noted
from engines.pytorch.slots import in_slots
from engines.pytorch.torch_engine import TorchEngine, memory_format
from engines.pytorch.torch_options import TorchOptions
from eval.measuring.arithmetic import FULL_SIZE, architecture_of, build_module, configs_of
from onnx_export.recipes import RECIPES
from sdxl import deepcache, schedulers
from sdxl.checkpoint import find
from sdxl.conditioning import Conditioning
from sdxl.engine import Engines
from sdxl.inflight import InFlight, Request
from sdxl.networks.parts import networks_of
from sdxl.policy import Limits
from sdxl.specs import CHUNK, TIME_IDS, network_specs

NUMBERS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
PRECISIONS = ("fp16", *NUMBERS)
UNETS = ("unet_deep", "unet_shallow")
SCHEDULE = find("mini").scheduler


@cache
def unets(precision: str, model: str = FULL_SIZE) -> Mapping[str, nn.Module]:
    """The UNet's networks in the torch backend's GPU form."""
    with torch.device("meta"):
        unet: Any = build_module("unet", configs_of(model)["unet"])
        # nn.Module's `to`, because the model's own `to` warns of irrelevant things.
        unet = nn.Module.to(unet, torch.float16).to(memory_format=torch.channels_last)
        if precision in NUMBERS:
            put_layers(unet, dict(numbers_of(unet, precision)))
        rearrange(unet)
        networks = networks_of("unet", unet, "reference")
        return {name: flagged(network) for name, network in networks.items()}


def numbers_of(unet: nn.Module, precision: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an export holds for the recipe's layers, without values."""
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


def engines_of(precision: str, model: str = FULL_SIZE) -> Engines:
    """The torch backend's engines as on a GPU, without memory."""
    arch = architecture_of(configs_of(model))
    specs = network_specs(arch, "float16")
    networks = unets(precision, model)
    engines = {name: TorchEngine(specs[name], network) for name, network in networks.items()}
    return Engines(
        arch,
        engines,
        device=torch.device("meta"),
        memory_format=memory_format(TorchOptions()),
        buckets=(1, *buckets(TARGETS["h200"].max_batch)),
    )


def begun(engines: Engines, images: int, latent: int) -> InFlight:
    """A loop with `images` images of four steps: deep, shallow, deep, shallow."""
    arch = engines.arch
    conditioning = Conditioning(
        torch.empty(2, CHUNK, arch.context_width, dtype=torch.float16, device="meta"),
        torch.empty(2, arch.pooled_width, dtype=torch.float16, device="meta"),
        torch.empty(2, TIME_IDS, dtype=torch.float16, device="meta"),
    )
    table = schedulers.table("euler", 4, SCHEDULE)
    limits = Limits(engines.buckets, rows=engines.buckets[-1])
    loop = InFlight(engines, lambda: 0.0, limits)
    for seed in range(images):
        plan = deepcache.plan(4, 2)
        loop.submit(Request(conditioning, table, plan, 5.0, seed, latent, latent))
    return loop


def inputs_of(name: str, rows: int, side: int) -> list[Tensor]:
    """The fp16 inputs of a call at this size in pixels."""
    arch = architecture_of(configs_of(FULL_SIZE))
    latent = side // arch.vae_scale
    axes = {"rows": rows, "tokens": CHUNK, "latent_h": latent, "latent_w": latent}
    return meta_inputs(network_specs(arch, "float16")[name], axes)


def launches_of(name: str, precision: str, rows: int, side: int = 1024) -> list[Launch]:
    """The launches of our kernels in one call, in order."""
    with torch.inference_mode(), noted() as launches:
        unets(precision)[name](*inputs_of(name, rows, side))
    return launches


def launches_in_slots(name: str, precision: str, rows: int) -> list[Launch]:
    """The same, of pictures of several sizes."""
    slot = 128**2
    axes = {"rows": rows, "tokens": CHUNK, "latent_h": 1, "latent_w": slot}
    spec = network_specs(architecture_of(configs_of(FULL_SIZE)), "float16")[name]
    sides = torch.empty(rows, 2, dtype=torch.int32, device="meta")
    with torch.inference_mode(), noted() as launches, in_slots(slot, sides):
        unets(precision)[name](*meta_inputs(spec, axes))
    return launches


def launches_of_a_picture(precision: str, latent: int = 128) -> list[Launch]:
    """The launches of decoding one picture."""
    with torch.inference_mode(), noted() as launches:
        decoder(precision)(latents_of(1, latent))
    return launches


def latents_of(images: int, latent: int) -> Tensor:
    return torch.empty(images, 4, latent, latent, dtype=torch.float16, device="meta")
