"""Trains the VAE's decoder alone on latents that differ a little from the encoder's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sdxl.mini.scenes import Scene, draw
from training.fitting import fit, in_half
from training.mini.autoencoder import as_tensor, load_vae, miss, miss_of_shapes
from training.mini.latents import encode_pictures, sample_pictures
from training.mini.plan import TrainingPlan
from training.mini.repainted import repaint_pictures

BLUR = 0.1  # at most so much noise, beside latents that deviate by 2.3


def train_decoder(plan: TrainingPlan, work: Path, device: str) -> None:
    """Half of each batch are the encoder's latents, half the UNet's, with a little noise on both:
    the decoder learns to correct what the UNet paints crooked."""
    torch.manual_seed(0)
    painted, encoded = repaint_pictures(plan, work, device), encode_pictures(plan, work, device)
    scenes = sample_pictures(plan)[0]
    vae = load_vae(work).to(device)
    half = plan.decoder_batch // 2
    odds = np.array([_odds_of(scene) for scene in scenes])
    odds /= odds.sum()

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        rows = rng.choice(len(scenes), half, p=odds)
        others = rng.integers(0, len(painted.latents), half)
        drawn = np.stack([draw(scenes[row], int(row)) for row in rows])
        images = as_tensor(np.concatenate([drawn, painted.wanted[others].numpy()])).to(device)
        latents = torch.cat([encoded.latents[rows], painted.latents[others]]).float().to(device)
        blur = BLUR * torch.rand(len(latents), 1, 1, 1, device=device)
        with in_half(device):
            decoded = vae.decode(latents + blur * torch.randn_like(latents)).sample
        return miss(decoded, images) + miss_of_shapes(decoded, images)

    fit(vae, loss_of, plan.decoder, work / "decoder.pt")


def _odds_of(scene: Scene) -> float:
    """Return how often to draw it: small stars and crosses are hardest to tell from latents."""
    is_small = any(thing.size == "small" for thing in scene.things)
    if scene.is_hard:
        return 1.0 if is_small else 0.6
    return 0.35 if is_small else 0.2
