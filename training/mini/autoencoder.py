"""Trains the VAE."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F

from sdxl.mini.scenes import SIDE, draw, sample_scene
from training.fitting import fit, in_half, load_fitted
from training.mini import topology
from training.mini.plan import TrainingPlan

CROP = 64
LEAST_INK = 50.0
LEAST_CONTRAST = 0.3  # the least contrast to the plain background of a pixel that counts as ink
STEEP = 10.0  # steepness at half the contrast; 0.3 to either side the curve is nearly flat
MISREAD = 2.5  # weight of the share of ink that the judge would misread as background or reverse
EDGES, COARSE = 0.5, 0.5  # weights of the error's slopes and of its means over large squares


def as_tensor(images: np.ndarray) -> Tensor:
    """Convert uint8 NHWC to float NCHW in −1…1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def _crops(rng: np.random.Generator, count: int, side: int) -> np.ndarray:
    crops = []
    for _ in range(count):
        image = draw(sample_scene(rng), int(rng.integers(2**31)))
        x, y = rng.integers(0, SIDE - side + 1, 2)
        crops.append(image[y : y + side, x : x + side])
    return np.stack(crops)


def miss(decoded: Tensor, images: Tensor) -> Tensor:
    """Return the distance of pictures in pixels, edges and plain surfaces."""
    error = decoded.float() - images
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    coarse = sum(F.avg_pool2d(error, side).abs().mean() for side in (4, 16))
    return error.abs().mean() + 2 * error.square().mean() + EDGES * edges + COARSE * coarse


def ink_of(maps: Tensor) -> Tensor:
    """Return the difference of pictures, or latents, from the plain background at the rim."""
    plain = (maps[:, :, 0].mean(-1) + maps[:, :, -1].mean(-1)) / 2
    return maps - plain[:, :, None, None]


def miss_of_ink(decoded: Tensor, images: Tensor) -> Tensor:
    """Return the distance of pixels as a share of each picture's ink, so that small things count
    too."""
    ink = ink_of(images).abs().sum((1, 2, 3)).clamp(min=LEAST_INK)
    return ((decoded.float() - images).abs().sum((1, 2, 3)) / ink).mean()


def miss_of_shapes(decoded: Tensor, images: Tensor) -> Tensor:
    return miss_of_ink(decoded, images) + MISREAD * misread(decoded, images)


def misread(decoded: Tensor, images: Tensor) -> Tensor:
    """Return roughly how many pixels are on the wrong side of an edge, as a share of each picture's
    ink: a differentiable form of the judge's count. A pixel is on the wrong side if its error is
    more than half of the difference between ink and background."""
    contrast = ink_of(images).norm(dim=1)
    ink = (contrast > LEAST_CONTRAST).float()
    area = ink.sum((1, 2)).clamp(min=LEAST_INK)
    usual = (contrast * ink).sum((1, 2)) / area
    off = (decoded.float() - images).norm(dim=1) / usual.clamp(min=0.5)[:, None, None]
    of_none = 1 / (1 + math.exp(STEEP / 2))
    wrong = torch.sigmoid(STEEP * (off - 0.5)) - of_none
    return (wrong.sum((1, 2)) / area).mean()


def train_vae(plan: TrainingPlan, work: Path, device: str) -> None:
    """Train on decoding the mean with a little noise. At the start, the noise of a sampled
    posterior would hide everything.

    Crops train quickly. Whole pictures, added later, train wide plain backgrounds.
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
        spread = (posterior.logvar.float() + 6).square().mean()
        size = posterior.mean.float().square().mean()
        return miss(decoded, images) + 1e-3 * spread + 1e-4 * size

    fit(vae, loss_of, plan.vae, work / "vae.pt")


def load_vae(work: Path) -> AutoencoderKL:
    """Load the VAE as trained so far. Its encoder is frozen, so that latents do not change."""
    vae = topology.new_vae()
    load_fitted(vae, work / "vae.pt")
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    load_fitted(vae, work / "decoder.pt")
    return vae
