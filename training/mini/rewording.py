"""Trains a painter to paint from one caption the picture that the model paints from another.

The target is the noise that the model predicts from the other caption. It varies less than the
noise added to a drawn picture, so few steps are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdxl.mini.scenes import Scene, draw
from training.mini import topology
from training.mini.latents import tokenize
from training.mini.styles import LIMIT, encode_images
from training.mini.unet_training import UNetWithText, add_noise, noise_weights

BLIND = 0.25
"""share of rows that are noise alone, as at a sampler's first step"""


@dataclass(frozen=True)
class Rewording:
    """Pictures' latents, the captions to learn, and captions that the model knows."""

    latents: Tensor
    tokens: list[Tensor]
    known_tokens: list[Tensor]
    alphas: Tensor

    @classmethod
    def of(
        cls, pipe: Any, scenes: Sequence[Scene], texts: list[str], known_texts: list[str]
    ) -> Rewording:
        latents = encode_images(pipe, [draw(scene, i) for i, scene in enumerate(scenes)])
        tokens, known_tokens = (
            [tokenize(each, captions) for each in (pipe.tokenizer, pipe.tokenizer_2)]
            for captions in (texts, known_texts)
        )
        alphas = topology.new_scheduler().alphas_cumprod.to(pipe.device)
        return cls(latents.to(pipe.device), tokens, known_tokens, alphas)

    def loss(
        self,
        student: UNetWithText,
        teacher: UNetWithText,
        count: int,
        captionless: float,
        rng: np.random.Generator,
    ) -> Tensor:
        """Return the distance of the student's noise from the teacher's, for random rows."""
        device = self.latents.device
        rows = torch.from_numpy(rng.integers(0, len(self.latents), count))
        kept = torch.from_numpy(rng.random(count) >= captionless).float().to(device)
        is_blind = torch.from_numpy(rng.random(count) < BLIND).to(device)
        noisy, timestep, _ = add_noise(self.latents[rows], self.alphas)
        timestep = torch.where(is_blind, len(self.alphas) - 1 - timestep // 10, timestep)
        noisy = torch.where(is_blind[:, None, None, None], torch.randn_like(noisy), noisy)
        with torch.no_grad():
            known = (each[rows].to(device) for each in self.known_tokens)
            wanted, _ = teacher(noisy, timestep, *known, kept)
        tokens = (each[rows].to(device) for each in self.tokens)
        predicted, _ = student(noisy, timestep, *tokens, kept)
        error = (predicted - wanted).square().mean((1, 2, 3))
        return (error * noise_weights(self.alphas, LIMIT)[timestep]).mean()


def painter_of(pipe: Any) -> UNetWithText:
    """Return a pipeline's networks, frozen."""
    painter = UNetWithText()
    for part in ("unet", "text_encoder", "text_encoder_2"):
        setattr(painter, part, getattr(pipe, part))
    return painter.requires_grad_(False).to(pipe.device)
