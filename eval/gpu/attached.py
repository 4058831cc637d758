"""Sections on requests with LoRAs or a ControlNet: the same pictures with and without, in turns.

The files have random weights of the model's size. LoRAs adapt every layer of the transformers.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from engines.bank_shelf import BankShelf, shapes_of
from engines.low_rank import TRANSFORMERS
from eval.gpu.bench import BATCH, Bench
from eval.gpu.mixed import counted, synchronized_s
from eval.speed.peers import prompts_for
from eval.speed.variants import INTERVALS, generate, requests_of
from sdxl.attachments import Lora
from sdxl.catalogue import Catalogue
from sdxl.controls import CANNY, Control
from sdxl.pipeline import Pipeline, WithPictures

Figures = Iterator[tuple[str, Any]]
RANK = 32
SIZE_OF_LORA = 0.01
"""of a random LoRA's factors"""
NET = "random"
MAP = "map.png"
ROUNDS = 3
Asked = Callable[[WithPictures, int], WithPictures]
"""A picture's request with what it is measured with, by the picture's number"""


def loras(bench: Bench) -> Figures:
    """A LoRA of its own for each picture."""
    pipeline = bench.pipeline(bench.served)
    folder = bench.out / "loras"
    write_loras(pipeline, folder)
    pipeline.catalogue = Catalogue([folder])

    def asked(each: WithPictures, number: int) -> WithPictures:
        return WithPictures(replace(each.params, loras=(Lora(f"{number}", 0.5),)))

    yield from compared(bench, asked)


def controls(bench: Bench) -> Figures:
    """One ControlNet for all pictures, like the UNet's way down."""
    pipeline = bench.pipeline(bench.served)
    folder = bench.out / "controlnets"
    write_net(bench, folder / NET)
    pipeline.catalogue = Catalogue(control_folders=[folder])
    control = Control(NET, MAP, strength=0.5, preprocess=CANNY, resize="crop")
    file = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").save(file, "PNG")

    def asked(each: WithPictures, _: int) -> WithPictures:
        params = replace(each.params, controls=(control,))
        return WithPictures(params, maps={MAP: file.getvalue()})

    yield from compared(bench, asked)


def compared(bench: Bench, asked: Asked) -> Figures:
    pipeline, prompts = bench.pipeline(bench.served), prompts_for(1 if bench.is_dry else BATCH)
    rounds = 1 if bench.is_dry else ROUNDS
    for interval in INTERVALS:
        plain = [WithPictures(each) for each in requests_of(bench.setting, interval, prompts)]
        for count in dict.fromkeys((len(plain), 1)):
            added = [asked(each, number) for number, each in enumerate(plain[:count])]
            run_plain = partial(generate, pipeline, plain[:count])
            run_added = partial(generate, pipeline, added)
            with counted(pipeline.engines) as work:
                first_s = synchronized_s(run_added)
            synchronized_s(run_plain)
            pairs = [(synchronized_s(run_plain), synchronized_s(run_added)) for _ in range(rounds)]
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
    """Write a LoRA for each picture, in the layout of PEFT."""
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

    from sdxl.checkpoint import find

    if folder.exists():
        return
    checkpoint = find(bench.setting.model)
    unet: Any = bench._part(checkpoint, "unet")
    with torch.device("meta"):
        made: Any = ControlNetModel.from_unet(
            unet,
            load_weights_from_unet=False,
            **({"conditioning_embedding_out_channels": (4, 8, 12, 16)} if bench.is_dry else {}),
        )
    net: Any = nn.Module.to(made, torch.float16).to_empty(device=bench.device)
    for parameter in net.parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
        parameter.data.normal_(0.0, 0.5 / fan_in**0.5 if parameter.dim() > 1 else 0.02)
    net.save_pretrained(folder)
