"""Sections that time pictures with and without LoRAs or a ControlNet, in turns.

The files have random weights of the full size. LoRAs adapt every layer of the transformers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from engines.bank_shelf import BankShelf, shapes_of
from engines.low_rank import TRANSFORMERS
from eval.gpu.bench import BATCH, Bench, Figures
from eval.gpu.mixed import counted
from eval.measuring.timing import device_s
from eval.speed.peers import prompts_for
from eval.speed.variants import INTERVALS, generate, requests_of
from sdxl.attachments import Lora
from sdxl.catalogue import Catalogue
from sdxl.checkpoint import find
from sdxl.controls import CANNY, Control
from sdxl.picture_files import file_of
from sdxl.pipeline import Pipeline, WithPictures

RANK = 32
SIZE_OF_LORA = 0.01
"""the standard deviation of a random LoRA's factors"""
NET = "random"
MAP = "map.png"
ROUNDS = 3
Addition = Callable[[WithPictures, int], WithPictures]
"""adds a LoRA or a ControlNet to a request; takes the request and its number"""


def loras(bench: Bench) -> Figures:
    """Each picture has another LoRA."""
    pipeline = bench.pipeline(bench.served)
    folder = bench.out / "loras"
    write_loras(pipeline, folder)
    pipeline.catalogue = Catalogue([folder])

    def add_lora(request: WithPictures, number: int) -> WithPictures:
        return WithPictures(replace(request.params, loras=(Lora(f"{number}", 0.5),)))

    yield from compare(bench, add_lora)


def controls(bench: Bench) -> Figures:
    """All pictures share one ControlNet, with the shape of the UNet's way down."""
    pipeline = bench.pipeline(bench.served)
    folder = bench.out / "controlnets"
    write_net(bench, folder / NET)
    pipeline.catalogue = Catalogue(control_folders=[folder])
    control = Control(NET, MAP, strength=0.5, preprocess=CANNY, resize="crop")
    gradient = file_of(Image.linear_gradient("L").convert("RGB"))

    def add_control(request: WithPictures, _: int) -> WithPictures:
        params = replace(request.params, controls=(control,))
        return WithPictures(params, maps={MAP: gradient})

    yield from compare(bench, add_control)


def compare(bench: Bench, add: Addition) -> Figures:
    pipeline, prompts = bench.pipeline(bench.served), prompts_for(1 if bench.is_dry else BATCH)
    rounds = 1 if bench.is_dry else ROUNDS
    for interval in INTERVALS:
        plain = [WithPictures(each) for each in requests_of(bench.setting, interval, prompts)]
        for count in dict.fromkeys((len(plain), 1)):
            added = [add(request, number) for number, request in enumerate(plain[:count])]
            run_plain = partial(generate, pipeline, plain[:count])
            run_added = partial(generate, pipeline, added)
            with counted(pipeline.engines) as work:
                first_s = device_s(run_added)
            device_s(run_plain)
            pairs = [(device_s(run_plain), device_s(run_added)) for _ in range(rounds)]
            plain_s, added_s = (statistics.median(each) for each in zip(*pairs, strict=True))
            yield (
                f"{count} pictures, interval {interval}",
                {
                    "plain_s": plain_s,
                    "added_s": added_s,
                    "speed of plain": plain_s / added_s,
                    "first_s": first_s,
                    **work,
                    "pairs": pairs,
                },
            )


def write_loras(pipeline: Pipeline, folder: Path) -> None:
    """Write a LoRA for each picture, in PEFT's layout."""
    shelf: Any = pipeline.engines.adapters
    assert isinstance(shelf, BankShelf)
    shapes = {n: s for n, s in shapes_of(shelf.bank).items() if TRANSFORMERS in n}
    folder.mkdir(parents=True, exist_ok=True)
    device = pipeline.engines.device
    for number in range(BATCH):
        generator = torch.Generator(device).manual_seed(number)
        tensors = {}
        for name, (outputs, inputs, *_) in shapes.items():
            for side, dims in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                drawn = torch.randn(dims, generator=generator, device=device)
                tensors[f"{name}.lora_{side}.weight"] = (SIZE_OF_LORA * drawn).half().cpu()
        save_file(tensors, folder / f"{number}.safetensors")


def write_net(bench: Bench, folder: Path) -> None:
    """Write a ControlNet in diffusers' layout."""
    from diffusers.models.controlnets.controlnet import ControlNetModel

    if folder.exists():
        return
    unet: Any = bench._part(find(bench.setting.model), "unet")
    small: Any = {"conditioning_embedding_out_channels": (4, 8, 12, 16)} if bench.is_dry else {}
    with bench.device:
        net: Any = ControlNetModel.from_unet(unet, load_weights_from_unet=False, **small)
    net.half().save_pretrained(folder)
