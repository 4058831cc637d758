"""Trains the VAE: all of it, then its decoder alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from sdxl.mini import topology
from sdxl.mini.fitting import fit, in_half, load_fitted
from sdxl.mini.plan import Plan
from sdxl.mini.scenes import SIDE, draw, sample_scene

CROP = 64


def as_tensor(images: np.ndarray) -> Tensor:
    """uint8 NHWC to float NCHW in −1…1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def _crops(rng: np.random.Generator, count: int, side: int) -> np.ndarray:
    crops = []
    for _ in range(count):
        image = draw(sample_scene(rng), int(rng.integers(2**31)))
        x, y = rng.integers(0, SIDE - side + 1, 2)
        crops.append(image[y : y + side, x : x + side])
    return np.stack(crops)


def train_vae(plan: Plan, work: Path, device: str) -> None:
    """Through the mean and a little noise, as a sampled posterior drowns at the start.

    Crops teach it quickly; whole pictures, mixed in later, teach it wide plain backgrounds.
    """
    torch.manual_seed(0)
    vae = topology.new_vae().to(device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        is_whole = step >= plan.vae_whole_from and step % 2 == 1
        side, count = (SIDE, plan.vae_batch // 4) if is_whole else (CROP, plan.vae_batch)
        images = as_tensor(_crops(rng, count, side)).to(device)
        with in_half(device):
            posterior = vae.encode(images).latent_dist
            decoded = vae.decode(posterior.mean + 0.05 * torch.randn_like(posterior.mean)).sample
        error = decoded.float() - images
        spread = (posterior.logvar.float() + 6).square().mean()
        size = posterior.mean.float().square().mean()
        return error.abs().mean() + 2 * error.square().mean() + 1e-3 * spread + 1e-4 * size

    fit(vae, loss_of, plan.vae, work / "vae.pt")


def load_vae(work: Path) -> AutoencoderKL:
    """As far as it is trained; its encoder comes frozen, for latents must not drift."""
    vae = topology.new_vae()
    load_fitted(vae, work / "vae.pt")
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    load_fitted(vae, work / "decoder.pt")
    return vae


def train_decoder(plan: Plan, work: Path, device: str) -> None:
    """Sharpen what the decoder makes of latents that are not quite an encoder's."""
    torch.manual_seed(0)
    vae = load_vae(work).to(device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        images = as_tensor(_crops(rng, plan.decoder_batch, SIDE)).to(device)
        with in_half(device):
            with torch.no_grad():
                latents = vae.encode(images).latent_dist.mean
            blur = 0.2 * torch.rand(len(latents), 1, 1, 1, device=device)
            decoded = vae.decode(latents + blur * torch.randn_like(latents)).sample
        error = decoded.float() - images
        return error.abs().mean() + error.square().mean()

    fit(vae, loss_of, plan.decoder, work / "decoder.pt")
