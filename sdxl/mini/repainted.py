"""Latents as the UNet paints them, and what they were meant to be: lessons for the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from sdxl.mini import topology
from sdxl.mini.autoencoder import load_vae
from sdxl.mini.fitting import load_fitted
from sdxl.mini.judge import straighten
from sdxl.mini.latents import Encoded, encode_pictures, sample_pictures
from sdxl.mini.plan import TrainingPlan
from sdxl.mini.scenes import Image, Scene, draw
from sdxl.mini.unet_training import STRONGEST, UNetWithText

STEPS = 20
LAST = 17  # of these steps
SETTLED = 8  # painted on from here a thing stays what it is, whatever the judge makes of it
_ROWS = 12


@dataclass(frozen=True)
class Repainted:
    """Unscaled latents, and the pictures wanted of them (uint8 NHWC)."""

    latents: Tensor
    wanted: Tensor


@torch.no_grad()
def repaint_pictures(plan: TrainingPlan, work: Path, device: str) -> Repainted:
    """The first of the UNet's pictures painted anew: every other batch from noise alone, the rest
    from the picture under some noise. Wanted is what was painted, with its things as straight as
    they can be."""
    path = work / f"repainted-{plan.repainted}.pt"
    if path.exists():
        return Repainted(**torch.load(path))
    painter, vae = UNetWithText(), load_vae(work).to(device)
    load_fitted(painter, work / "shapes.pt")
    painter.to(device).eval()
    data, scenes = encode_pictures(plan, work, device), sample_pictures(plan)[0]
    rng = np.random.default_rng(12)
    torch.manual_seed(12)
    kept: list[Tensor] = []
    wanted: list[Image] = []
    for start in range(0, plan.repainted, _ROWS):
        rows = torch.arange(start, min(start + _ROWS, plan.repainted))
        first = int(rng.integers(1, LAST)) if start // _ROWS % 2 else 0
        painted = _repaint(painter, data, rows, first, device)
        for row, latents, image in zip(
            rows.tolist(), painted, _pictures(vae, painted.to(device)), strict=True
        ):
            aim = _aim(image, scenes[row], row, is_settled=first >= SETTLED)
            if aim is not None:
                kept.append(latents)
                wanted.append(aim)
        if start % 600 == 0:
            print(f"repainted {start} of {plan.repainted} pictures", flush=True)
    repainted = Repainted(torch.stack(kept), torch.from_numpy(np.stack(wanted)))
    torch.save(vars(repainted), path)
    return repainted


def _aim(image: Image, scene: Scene, row: int, is_settled: bool) -> Image | None:
    straight = straighten(image, scene)
    return draw(scene, row) if straight is None and is_settled else straight


def _pictures(vae: AutoencoderKL, latents: Tensor) -> list[Image]:
    decoded = vae.decode(latents.float()).sample.clamp(-1, 1)
    return list(((decoded + 1) * 127.5 + 0.5).byte().permute(0, 2, 3, 1).cpu().numpy())


def _repaint(painter: UNetWithText, data: Encoded, rows: Tensor, first: int, device: str) -> Tensor:
    """From the noise of step `first` to the end, each row guided as strongly as it likes."""
    scheduler = topology.new_scheduler()
    scheduler.set_timesteps(STEPS)
    pictures = data.latents[rows].float().to(device) * data.scale if first else 0.0
    noise = torch.randn(len(rows), *data.latents.shape[1:], device=device)
    latents = pictures + scheduler.sigmas[first].to(device) * noise
    tokens, tokens_2 = (t[rows].to(device).repeat(2, 1) for t in (data.tokens, data.tokens_2))
    kept = torch.ones(2 * len(rows), device=device)
    kept[len(rows) :] = 0
    guidance = 1 + (STRONGEST - 1) * torch.rand(len(rows), 1, 1, 1, device=device)
    for timestep in scheduler.timesteps[first:]:
        inputs = scheduler.scale_model_input(latents, timestep).repeat(2, 1, 1, 1)
        timesteps = timestep.to(device).repeat(len(inputs))
        predicted, _ = painter(inputs, timesteps, tokens, tokens_2, kept)
        captioned, captionless = predicted.chunk(2)
        guided = captionless + guidance * (captioned - captionless)
        latents = scheduler.step(guided, timestep, latents).prev_sample
    return (latents / data.scale).half().cpu()
