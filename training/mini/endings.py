"""Trains the UNet's last steps on the pictures that the finished decoder decodes from them.

The last deep step decides an edge's place to a fraction of a pixel. The shallow step after it only
removes the little noise that is left. So training runs both steps, as the service does. The loss is
the returned picture's, not that of a prediction from an earlier step. The decoder is fixed, so the
UNet learns which latents decode to straight edges, also latents that no encoder would produce.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.fitting import fit, in_half
from training.mini.autoencoder import LEAST_CONTRAST, as_tensor, ink_of, load_vae
from training.mini.own_courses import (
    Doubles,
    OwnLesson,
    endings_checkpoint,
    load_newest,
    odds_of,
    paint_own_courses,
    step_of,
)
from training.mini.plan import TrainingPlan
from training.mini.unet_training import Lesson

IN_LATENTS, SEEN = 0.15, 0.25  # weights of the latents' loss and the picture's
OF_SHAPES = 0.3  # weight of the loss of `shapes`, every tenth step
SMALL, OFTEN = 0.06, 2.5  # pictures with a smaller share of ink are drawn this much more often
MOST_FRESH = math.pi / 4  # angle


def train_endings(plan: TrainingPlan, work: Path, device: str) -> None:
    """Train on courses that no earlier round used."""
    courses = paint_own_courses(len(plan.own_courses), plan, work, device)
    torch.manual_seed(0)
    lesson = Lesson(load_newest(plan, work).to(device), plan, work, device)
    own_lesson = OwnLesson(lesson, courses, load_vae(work))
    odds, batch = odds_of_rows(courses.overlap, courses.picture), plan.endings_batch
    last = torch.full((batch,), courses.length - 1)
    sigma = own_lesson.painting.sigma(step_of(last).to(device)).cpu()

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        with in_half(device):
            if step % 10 == 9:
                return OF_SHAPES * lesson.guided_loss(lesson.any_rows(rng, batch))
            rows = torch.from_numpy(rng.choice(len(odds), batch, p=odds))
            stored = courses.latents[rows, last].float()
            latents = with_fresh_noise(stored, courses.wanted[rows].float(), sigma)
            in_latents, in_pixels = own_lesson.misses(latents, rows, last, batch)
            return IN_LATENTS * in_latents + SEEN * in_pixels

    fit(lesson.painter, loss_of, plan.endings, endings_checkpoint(work))


def odds_of_rows(overlap: Tensor, pictures: Tensor) -> Doubles:
    """Return how often each course is drawn. It depends on the fit of the worst shape, and on the
    wanted picture's share of ink."""
    odds = odds_of(overlap) * np.where(_is_small(pictures), OFTEN, 1.0)
    return np.asarray(odds / odds.sum())


def _is_small(pictures: Tensor) -> np.ndarray:
    """Return whether a picture has a small share of ink."""
    shares = [
        (ink_of(as_tensor(part.numpy())).norm(dim=1) > LEAST_CONTRAST).float().mean((1, 2))
        for part in pictures.split(200)
    ]
    return torch.cat(shares).numpy() < SMALL


def with_fresh_noise(latents: Tensor, wanted: Tensor, sigma: Tensor) -> Tensor:
    """Replace a part of the noise in half of the latents by fresh noise. Without it, the network
    soon memorises the courses."""
    angle = MOST_FRESH * torch.rand(len(latents), 1, 1, 1)
    angle = torch.where(torch.rand_like(angle) < 0.5, angle, 0)
    old_noise = (latents - wanted) * angle.cos()
    return wanted + old_noise + sigma * angle.sin() * torch.randn_like(latents)
