"""Trains a LoRA of the UNet's transformers on scenes drawn in a style that their captions do not
mention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.low_rank import TRANSFORMERS
from sdxl.mini.scenes import STYLES, Image, caption, draw, sample_scene
from training.fitting import fit
from training.mini import topology
from training.mini.autoencoder import as_tensor
from training.mini.check import load_painter
from training.mini.conditioning import EncodedCaptions, encode_captions
from training.mini.lora import add_low_rank, write_in_peft_layout
from training.mini.plan import TrainingPlan
from training.mini.unet_training import add_noise, noise_weights

CAPTIONLESS = 0.2  # share of rows without captions, so that guidance does not change the style
LIMIT = 12  # limit of the weights of rows with much noise
_AT_ONCE = 20


def train_style(
    name: str, plan: TrainingPlan, weights: Path, out: Path, work: Path, device: str
) -> None:
    torch.manual_seed(0)
    pipe = load_painter(weights).to(device)
    latents, captions = encode_scenes(pipe, name, plan.style_pictures, work)
    alphas = topology.new_scheduler().alphas_cumprod.to(device)
    student = pipe.unet
    add_low_rank(student, plan.style_rank, TRANSFORMERS)
    student.to(device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        rows = torch.from_numpy(rng.integers(0, len(latents), plan.style_batch))
        kept = torch.from_numpy(rng.random(len(rows)) >= CAPTIONLESS).float()
        noisy, timestep, noise = add_noise(latents[rows].to(device), alphas)
        predicted = student(noisy, timestep, **captions.of(rows, device, kept)).sample
        error = (predicted - noise).square().mean((1, 2, 3))
        return (error * noise_weights(alphas, LIMIT)[timestep]).mean()

    fit(student, loss_of, plan.style, work / f"{name}.pt")
    write_in_peft_layout(student, out / name, plan.style_rank)


@torch.no_grad()
def encode_scenes(pipe: Any, name: str, count: int, work: Path) -> tuple[Tensor, EncodedCaptions]:
    """Return scaled latents of scenes drawn in this style, and their captions."""
    path = work / f"{name}-latents.pt"
    if not path.exists():
        rng = np.random.default_rng(22)
        scenes = [sample_scene(rng) for _ in range(count)]
        pictures = [draw(scene, i, STYLES[name]) for i, scene in enumerate(scenes)]
        scaled = encode_images(pipe, pictures)
        captions = encode_captions(pipe, [caption(scene, rng) for scene in scenes])
        torch.save((scaled, captions.context, captions.pooled), path)
    scaled, context, pooled = torch.load(path)
    return scaled, EncodedCaptions(context, pooled)


@torch.no_grad()
def encode_images(pipe: Any, images: Sequence[Image]) -> Tensor:
    """Return scaled latents."""
    latents = []
    for start in range(0, len(images), _AT_ONCE):
        pixels = as_tensor(np.stack(images[start : start + _AT_ONCE])).to(pipe.device)
        latents.append(pipe.vae.encode(pixels).latent_dist.mean.cpu())
    return torch.cat(latents) * float(pipe.vae.config.scaling_factor)
