"""The launches of our kernels in calls of SDXL's networks, and a loop over them, without a GPU."""

from __future__ import annotations

import torch

from engines.folders.profiles import buckets
from engines.folders.targets import TARGETS
from engines.low_rank import adapted, bank_of
from engines.pytorch.launches import Launch, meta_inputs, noted
from engines.pytorch.slots import in_slots
from engines.pytorch.torch_engine import TorchEngine, memory_format
from engines.pytorch.torch_options import TorchOptions
from eval.measuring.arithmetic import FULL_SIZE, architecture_of, configs_of
from eval.speed.meta_networks import bank, decoder, inputs_of, latents_of, unets
from sdxl import deepcache, schedulers
from sdxl.checkpoint import find
from sdxl.conditioning import Conditioning
from sdxl.engine import Engines
from sdxl.inflight import InFlight, Request
from sdxl.policy import Limits
from sdxl.specs import CHUNK, TIME_IDS, VARIANTS, network_specs

SCHEDULE = find("mini").scheduler


def engines_of(precision: str, model: str = FULL_SIZE) -> Engines:
    """The torch backend's engines as on a GPU, on the meta device."""
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


def launches_of(name: str, precision: str, rows: int, side: int = 1024) -> list[Launch]:
    """The launches of our kernels in one call, in order."""
    with torch.inference_mode(), noted() as launches:
        unets(precision)[name](*inputs_of(name, rows, side))
    return launches


def launches_with_loras(precision: str, rows: int) -> list[Launch]:
    """The launches in a deep call whose rows have LoRAs."""
    module = unets(precision)["unet_deep"]
    pages, scales = torch.zeros(2, rows, 2, device="meta")
    own = bank_of(VARIANTS["lora"]["unet_deep"], module, bank())
    with torch.inference_mode(), noted() as launches, adapted(own, pages.long(), scales):
        module(*inputs_of("unet_deep", rows, 1024))
    return launches


def launches_in_slots(name: str, precision: str, rows: int, slot: int = 128**2) -> list[Launch]:
    """The launches in one call for pictures of several sizes."""
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
