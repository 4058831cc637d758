"""Trains a network's last sampling steps on the pictures that the decoder decodes from them.

These steps decide an edge's place to a fraction of a pixel (training/mini/endings.py). Pictures are
painted, and their latents before each of the last steps are stored. The prediction from these
latents must decode to the wanted picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdxl.mini.scenes import Image
from training.fitting import in_half
from training.mini import topology
from training.mini.autoencoder import as_tensor, miss, miss_of_shapes
from training.mini.painting import STEPS, to_images
from training.mini.unet_training import any_guidance, guide

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""returns the noise of rows with captions, then of the same rows without, from noisy latents,
timesteps and rows"""
Aim = Callable[[int, Image], Image | None]
"""returns the wanted picture for a row's painted picture; None omits the row"""
_AT_ONCE = 12


@dataclass(frozen=True)
class Courses:
    """Latents before each of the last steps, [n, steps, ...], with rows, guidance and the wanted
    pictures (uint8 NHWC)."""

    latents: Tensor
    rows: Tensor
    guidance: Tensor
    picture: Tensor


class LastSteps:
    """The sampler's steps from `first` on."""

    def __init__(self, pipe: Any, first: int) -> None:
        self.first, self._device = first, pipe.device
        self._vae = pipe.vae.requires_grad_(False)
        self._scale = float(pipe.vae.config.scaling_factor)
        scheduler = topology.new_scheduler()
        scheduler.set_timesteps(STEPS)
        self._sigmas = scheduler.sigmas.float().to(self._device)
        self._timesteps = scheduler.timesteps.long().to(self._device)

    def loss(
        self, predict: Predict, courses: Courses, batch: int, rng: np.random.Generator
    ) -> Tensor:
        """Return how far decoded predictions are from the wanted pictures."""
        chosen = torch.from_numpy(rng.integers(0, len(courses.rows), batch))
        at = torch.from_numpy(rng.integers(0, STEPS - self.first, batch))
        latents = courses.latents[chosen, at].float().to(self._device)
        step, rows, guidance = at + self.first, courses.rows[chosen], courses.guidance[chosen]
        with in_half(self._device.type):
            noise = self._noise(predict, latents, step, rows, guidance)
            predicted = latents - self._sigma(step) * noise
            decoded = self._vae.decode(predicted / self._scale).sample.float()
        pictures = as_tensor(courses.picture[chosen].numpy()).to(self._device)
        return miss_of_shapes(decoded, pictures) + miss(decoded, pictures)

    @torch.no_grad()
    def paint(self, predict: Predict, aim: Aim, count: int, path: Path) -> Courses:
        """Paint the first rows, or load them if they were painted before."""
        if path.exists():
            return Courses(**torch.load(path))
        torch.manual_seed(27)
        parts = []
        for rows in torch.arange(count).split(_AT_ONCE):
            parts.append(self._paint(predict, aim, rows))
            if rows[0] % (10 * _AT_ONCE) == 0:
                print(f"painted {int(rows[0])} of {count} courses", flush=True)
        courses = Courses(*(torch.cat([vars(p)[f.name] for p in parts]) for f in fields(Courses)))
        torch.save(vars(courses), path)
        return courses

    def _paint(self, predict: Predict, aim: Aim, rows: Tensor) -> Courses:
        guidance = any_guidance(len(rows))
        noise = torch.randn(len(rows), topology.LATENT_CHANNELS, *[topology.LATENT_SIDE] * 2)
        latents, before = self._sigmas[0] * noise.to(self._device), []
        for at in range(STEPS):
            before.append(latents.half().cpu())
            step = torch.full((len(rows),), at)
            with in_half(self._device.type):
                predicted = self._noise(predict, latents, step, rows, guidance)
            latents = latents + (self._sigma(step + 1) - self._sigma(step)) * predicted
        images = to_images(self._vae, latents / self._scale)
        aims = [aim(row, image) for row, image in zip(rows.tolist(), images, strict=True)]
        is_kept = torch.tensor([each is not None for each in aims])
        wanted = np.array([each for each in aims if each is not None], np.uint8)
        pictures = torch.from_numpy(wanted.reshape(-1, *images[0].shape))
        course = torch.stack(before[self.first :], dim=1)
        return Courses(course[is_kept], rows[is_kept], guidance[is_kept], pictures)

    def _noise(
        self, predict: Predict, latents: Tensor, step: Tensor, rows: Tensor, guidance: Tensor
    ) -> Tensor:
        inputs = latents / (self._sigma(step) ** 2 + 1).sqrt()
        timestep = self._timesteps[step.to(self._device)]
        captioned, captionless = predict(inputs, timestep, rows).float().chunk(2)
        return guide(captioned, captionless, guidance.to(self._device))

    def _sigma(self, step: Tensor) -> Tensor:
        return self._sigmas[step.to(self._device)].view(-1, 1, 1, 1)
