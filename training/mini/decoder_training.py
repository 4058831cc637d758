"""Trains the VAE's decoder, not the encoder, on latents that differ a little from the encoder's.

The UNet paints half of the latents. The wanted pictures of these are the painted pictures with
straightened things, so that the decoder learns to correct the UNet's errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sdxl.mini.scenes import Image, Scene, draw
from training.fitting import fit, in_half
from training.mini.autoencoder import as_tensor, load_vae, miss, miss_of_shapes
from training.mini.judge import straighten
from training.mini.latents import encode_pictures, sample_pictures
from training.mini.neighbours import is_hard
from training.mini.own_courses import load_newest
from training.mini.painting import paint, to_images
from training.mini.plan import TrainingPlan
from training.mini.unet_training import any_guidance

BLUR = 0.1  # the most noise added to latents, whose standard deviation is 2.3
LAST = 17  # the last of the sampler's steps at which repainting begins
SETTLED = 8  # things repainted from this step on stay right, even if the judge disagrees
_ROWS = 12


def train_decoder(plan: TrainingPlan, work: Path, device: str) -> None:
    """Train on batches of the encoder's latents and as many of the UNet's, all with noise."""
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
    """Return how often to use a scene. Small stars and crosses are the hardest to decode."""
    is_small = any(thing.size == "small" for thing in scene.things)
    if is_hard(scene):
        return 1.0 if is_small else 0.6
    return 0.35 if is_small else 0.2


@dataclass(frozen=True)
class Repainted:
    """Unscaled latents, and the wanted pictures (uint8 NHWC)."""

    latents: Tensor
    wanted: Tensor


@torch.no_grad()
def repaint_pictures(plan: TrainingPlan, work: Path, device: str) -> Repainted:
    """Paint the first of the UNet's pictures again: every other batch from noise, the rest from the
    picture with some noise."""
    path = work / f"repainted-{plan.repainted}.pt"
    if path.exists():
        return Repainted(**torch.load(path))
    painter, vae = load_newest(plan, work).to(device), load_vae(work).to(device)
    data, scenes = encode_pictures(plan, work, device), sample_pictures(plan)[0]
    rng = np.random.default_rng(12)
    torch.manual_seed(12)
    kept: list[Tensor] = []
    wanted: list[Image] = []
    for start in range(0, plan.repainted, _ROWS):
        rows = torch.arange(start, min(start + _ROWS, plan.repainted))
        first = int(rng.integers(1, LAST)) if start // _ROWS % 2 else 0
        begun = data.latents[rows].float().to(device) * (data.scale if first else 0)
        texts = data.tokens[rows], data.tokens_2[rows]
        *_, scaled = paint(painter, begun, *texts, any_guidance(len(rows)), first)
        painted = scaled / data.scale
        images = to_images(vae, painted)
        for row, latents, image in zip(rows.tolist(), painted.half().cpu(), images, strict=True):
            straight = straighten(image, scenes[row])
            if straight is not None or first >= SETTLED:
                kept.append(latents)
                wanted.append(straight.picture if straight else draw(scenes[row], row))
        if start % 600 == 0:
            print(f"repainted {start} of {plan.repainted} pictures", flush=True)
    repainted = Repainted(torch.stack(kept), torch.from_numpy(np.stack(wanted)))
    torch.save(vars(repainted), path)
    return repainted
