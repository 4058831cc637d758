"""The UNet's painted latents with the pictures that they should be: data for the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sdxl.mini.judge import straighten
from sdxl.mini.scenes import Image, Scene, draw
from training.mini.autoencoder import load_vae
from training.mini.latents import encode_pictures, sample_pictures
from training.mini.own_courses import load_newest
from training.mini.painting import paint, to_images
from training.mini.plan import TrainingPlan
from training.mini.unet_training import any_guidance

LAST = 17  # of the sampler's steps
SETTLED = 8  # painted on from here a thing stays what it is, whatever the judge makes of it
_ROWS = 12


@dataclass(frozen=True)
class Repainted:
    """Unscaled latents, and the wanted pictures (uint8 NHWC)."""

    latents: Tensor
    wanted: Tensor


@torch.no_grad()
def repaint_pictures(plan: TrainingPlan, work: Path, device: str) -> Repainted:
    """Paint the first of the UNet's pictures again: every other batch from noise alone, the rest
    from the picture with some noise. The wanted picture is the painted one with straightened
    things."""
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
    if straight is not None:
        return straight.picture
    return draw(scene, row) if is_settled else None
