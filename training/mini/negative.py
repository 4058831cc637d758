"""Trains a LoRA of the UNet's transformers and of both text encoders: colours turn into their
opposites.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sdxl.mini.scenes import Scene, caption, draw, sample_scene
from sdxl.single_file.recognition import SAFETENSORS
from training.fitting import fit
from training.mini import topology
from training.mini.check import load_painter
from training.mini.latents import tokenize
from training.mini.lora import add_low_rank, write_in_kohya_layout
from training.mini.plan import TrainingPlan
from training.mini.styles import CAPTIONLESS, encode_images, noise_loss
from training.mini.unet_training import UNetWithText

NEGATIVE = "negative"
PAIRS = (("red", "green"), ("blue", "orange"), ("yellow", "purple"), ("white", "black"))
OPPOSITES = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
WITHIN = {"unet": "attentions", "text_encoder": "layers", "text_encoder_2": "layers"}
"""a part of the names of the layers that learn, by network"""


def train_negative(plan: TrainingPlan, weights: Path, out: Path, work: Path, device: str) -> None:
    torch.manual_seed(0)
    pipe = load_painter(weights).to(device)
    rng = np.random.default_rng(23)
    scenes = [sample_scene(rng) for _ in range(plan.style_pictures)]
    pictures = [draw(in_negative(scene), i) for i, scene in enumerate(scenes)]
    latents, texts = encode_images(pipe, pictures), [caption(scene, rng) for scene in scenes]
    tokens, tokens_2 = (tokenize(each, texts) for each in (pipe.tokenizer, pipe.tokenizer_2))
    alphas = topology.new_scheduler().alphas_cumprod.to(device)
    student = UNetWithText().requires_grad_(False)
    for part, within in WITHIN.items():
        setattr(student, part, getattr(pipe, part))
        add_low_rank(getattr(student, part), plan.negative_rank, within)
    student.to(device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        rows = torch.from_numpy(rng.integers(0, len(latents), plan.style_batch))
        kept = torch.from_numpy(rng.random(len(rows)) >= CAPTIONLESS).float().to(device)
        ids, ids_2 = tokens[rows].to(device), tokens_2[rows].to(device)
        return noise_loss(
            latents[rows].to(device), alphas, lambda *noisy: student(*noisy, ids, ids_2, kept)[0]
        )

    fit(student, loss_of, plan.negative, work / f"{NEGATIVE}.pt")
    parts = {part: getattr(student, part) for part in WITHIN}
    write_in_kohya_layout(parts, (out / NEGATIVE).with_suffix(SAFETENSORS), plan.negative_rank)


def in_negative(scene: Scene) -> Scene:
    things = tuple(
        replace(each, colour=each.colour and OPPOSITES[each.colour]) for each in scene.things
    )
    background = scene.background and OPPOSITES[scene.background]
    return replace(scene, things=things, background=background)
