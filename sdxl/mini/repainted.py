"""Latents as the UNet paints them, for the decoder to learn from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sdxl.mini import topology
from sdxl.mini.fitting import load_fitted
from sdxl.mini.latents import Encoded, encode_pictures
from sdxl.mini.plan import TrainingPlan
from sdxl.mini.unet_training import STRONGEST, UNetWithText

STEPS = 20
FIRST, LAST = 8, 17  # of these steps: with less noise the shape is settled, with more it moves away
_ROWS = 12


@torch.no_grad()
def repaint_pictures(plan: TrainingPlan, work: Path, device: str) -> Tensor:
    """Unscaled latents of the first of the UNet's pictures: noised, then painted to the end."""
    path = work / f"repainted-{plan.repainted}.pt"
    if path.exists():
        found: Tensor = torch.load(path)
        return found
    painter = UNetWithText()
    load_fitted(painter, work / "shapes.pt")
    painter.to(device).eval()
    data, rng = encode_pictures(plan, work, device), np.random.default_rng(12)
    torch.manual_seed(12)
    painted = []
    for start in range(0, plan.repainted, _ROWS):
        rows = torch.arange(start, min(start + _ROWS, plan.repainted))
        painted.append(_repaint(painter, data, rows, int(rng.integers(FIRST, LAST)), device))
        if start % 600 == 0:
            print(f"repainted {start} of {plan.repainted} pictures", flush=True)
    latents = torch.cat(painted)
    torch.save(latents, path)
    return latents


def _repaint(painter: UNetWithText, data: Encoded, rows: Tensor, first: int, device: str) -> Tensor:
    """From the noise of step `first` to the end, each row guided as strongly as it likes."""
    scheduler = topology.new_scheduler()
    scheduler.set_timesteps(STEPS)
    latents = data.latents[rows].float().to(device) * data.scale
    latents = latents + scheduler.sigmas[first].to(device) * torch.randn_like(latents)
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
