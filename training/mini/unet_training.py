"""Trains the UNet together with both text encoders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.fitting import fit, load_latest
from training.mini import topology
from training.mini.latents import Encoded, encode_groups, encode_pictures, tokenize, tokenizers
from training.mini.plan import GROUP, Contrast, TrainingPlan

EMPTY_ZEROED, EMPTY_ENCODED = 0.10, 0.02  # shares of rows with SDXL's and the plain empty caption
OFFSET_NOISE = 0.25
SKETCH_SHARE = 0.1  # weight of the sketch's error in the loss
CAPTIONLESS_SHARE, GUIDED_SHARE = 0.3, 0.2  # weights of these errors; the captioned one's is 1
GUIDED_BELOW, STRONGEST = 700, 7.0  # timestep; guidance


class Sketch(nn.Module):
    """Predicts a coarse thumbnail from a caption's context, during training only.

    SDXL's text encoders were trained before its UNet. These are trained together with the UNet, and
    from the noise's error alone they learn places of colours very slowly.
    """

    SIDE, WIDTH, HEADS = 8, 64, 4

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.5 * torch.randn(1, self.SIDE**2, self.WIDTH))
        self.norm = nn.LayerNorm(2 * topology.TEXT_WIDTH)
        self.read = nn.MultiheadAttention(
            self.WIDTH,
            self.HEADS,
            kdim=2 * topology.TEXT_WIDTH,
            vdim=2 * topology.TEXT_WIDTH,
            batch_first=True,
        )
        self.colour = nn.Sequential(
            nn.LayerNorm(self.WIDTH),
            nn.Linear(self.WIDTH, 4 * self.WIDTH),
            nn.GELU(),
            nn.Linear(4 * self.WIDTH, 3),
        )

    def forward(self, context: Tensor) -> Tensor:
        normed = self.norm(context)
        places = self.places.expand(len(context), -1, -1)
        read, _ = self.read(places, normed, normed, need_weights=False)
        colours: Tensor = self.colour(places + read)
        return colours.movedim(1, 2).unflatten(2, (self.SIDE, self.SIDE))


class UNetWithText(nn.Module):
    """The UNet and both text encoders, connected as in SDXL."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = topology.new_unet()
        self.text_encoder = topology.new_text_encoder()
        self.text_encoder_2 = topology.new_text_encoder_2()
        self.sketch = Sketch()

    def forward(
        self, noisy: Tensor, timestep: Tensor, tokens: Tensor, tokens_2: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the noise and a sketch. `kept` is 1 for rows with captions, and 0 for rows whose
        context and pooled are zeroed."""
        context, pooled = self.read(tokens, tokens_2)
        added = {"text_embeds": pooled * kept[:, None], "time_ids": time_ids(context)}
        predicted: Tensor = self.unet(
            noisy, timestep, context * kept[:, None, None], added_cond_kwargs=added
        ).sample
        return predicted, self.sketch(context)

    def read(self, tokens: Tensor, tokens_2: Tensor) -> tuple[Tensor, Tensor]:
        """Return context and pooled."""
        first = self.text_encoder(tokens, output_hidden_states=True)
        second = self.text_encoder_2(tokens_2, output_hidden_states=True)
        context = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        return context, second.text_embeds

    def with_and_without(
        self, noisy: Tensor, timestep: Tensor, tokens: Tensor, tokens_2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the rows' noise with and without their captions."""
        kept = torch.ones(2 * len(noisy), device=noisy.device)
        kept[len(noisy) :] = 0
        predicted, _ = self(
            noisy.repeat(2, 1, 1, 1),
            timestep.repeat(2),
            tokens.repeat(2, 1),
            tokens_2.repeat(2, 1),
            kept,
        )
        captioned, captionless = predicted.float().chunk(2)
        return captioned, captionless


def time_ids(rows: Tensor) -> Tensor:
    """Return SDXL's size conditions for each row."""
    ids = torch.tensor([topology.TIME_IDS], dtype=torch.float32, device=rows.device)
    return ids.repeat(len(rows), 1)


def any_guidance(count: int) -> Tensor:
    """Draw a guidance for each row."""
    return 1 + (STRONGEST - 1) * torch.rand(count, 1, 1, 1)


def guide(captioned: Tensor, captionless: Tensor, guidance: Tensor) -> Tensor:
    return captionless + guidance * (captioned - captionless)


def add_noise(clean: Tensor, alphas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy latents, their timesteps and the noise."""
    noise = torch.randn_like(clean) + OFFSET_NOISE * torch.randn_like(clean[:, :, :1, :1])
    timestep = torch.randint(0, len(alphas), (len(clean),), device=clean.device)
    alpha = alphas[timestep].view(-1, 1, 1, 1)
    return alpha.sqrt() * clean + (1 - alpha).sqrt() * noise, timestep, noise


def guided_error(
    captioned: Tensor, captionless: Tensor, wanted: Tensor, timestep: Tensor
) -> Tensor:
    """Return each row's error with and without captions, and of both combined by any guidance.

    With guidance g, a picture has g times the error with its caption minus g − 1 times the error
    without. Trained together, the two errors cancel, and shapes stay right.
    """
    guided = guide(captioned, captionless, any_guidance(len(wanted)).to(wanted.device))
    errors = [(p - wanted).square().mean((1, 2, 3)) for p in (captioned, captionless, guided)]
    error = errors[0] + CAPTIONLESS_SHARE * errors[1]
    return error + GUIDED_SHARE * errors[2] * (timestep < GUIDED_BELOW)


def noise_weights(alphas: Tensor, limit: float) -> Tensor:
    """Return weights that turn the noise's error into the velocity's, up to a limit. A limit of 1
    gives the plain error.

    Places are decided under much noise, where the plain error hardly depends on the picture.
    """
    weights = (1 / alphas).clamp(max=limit)
    return weights / weights.mean()


class Lesson:
    """The loss of noise predictions on cached latents. Some captions are dropped."""

    def __init__(self, painter: UNetWithText, plan: TrainingPlan, work: Path, device: str) -> None:
        self.painter, self.plan, self.device = painter, plan, device
        self.alphas = topology.new_scheduler().alphas_cumprod.to(device)
        self.data = encode_pictures(plan, work, device)
        self.scale = self.data.scale
        self.empty, self.empty_2 = (tokenize(t, [""]) for t in tokenizers(work))

    def loss(
        self,
        data: Encoded,
        rows: Tensor,
        group: int,
        lowest: int,
        limit: float,
        rng: np.random.Generator,
        is_blind: bool = False,
    ) -> Tensor:
        """Return the loss. A group's rows share timestep and noise. The noise's offset makes
        backgrounds depend on captions.

        Blind rows are noise alone, as at a sampler's first step. They must predict the noise that
        would leave their picture, which only the caption determines.
        """
        draws = torch.from_numpy(rng.random(len(rows) // group)).repeat_interleave(group)
        kept = (draws >= EMPTY_ZEROED).float().to(self.device)
        is_blank = ((draws >= EMPTY_ZEROED) & (draws < EMPTY_ZEROED + EMPTY_ENCODED))[:, None]
        tokens = torch.where(is_blank, self.empty, data.tokens[rows]).to(self.device)
        tokens_2 = torch.where(is_blank, self.empty_2, data.tokens_2[rows]).to(self.device)
        latents = data.latents[rows].float().to(self.device) * self.scale
        first = latents[::group]
        offset = 0.0 if is_blind else OFFSET_NOISE
        noise = torch.randn_like(first) + offset * torch.randn_like(first[:, :, :1, :1])
        noise = noise.repeat_interleave(group, dim=0)
        timestep = torch.randint(lowest, len(self.alphas), (len(first),), device=self.device)
        timestep = timestep.repeat_interleave(group)
        alpha = self.alphas[timestep].view(-1, 1, 1, 1)
        if is_blind:
            noisy, noise = noise, (noise - alpha.sqrt() * latents) / (1 - alpha).sqrt()
        else:
            noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * noise
        predicted, sketched = self.painter(noisy, timestep, tokens, tokens_2, kept)
        error = (predicted - noise).square().mean((1, 2, 3))
        thumbnails = data.thumbnails[rows].float().to(self.device)
        rough = F.adaptive_avg_pool2d(thumbnails, Sketch.SIDE)
        return (error * noise_weights(self.alphas, limit)[timestep]).mean() + (
            SKETCH_SHARE * (sketched - rough).square().mean()
        )

    def any_rows(self, rng: np.random.Generator, count: int) -> Tensor:
        return torch.from_numpy(rng.integers(0, len(self.data.latents), count))

    def contrast_loss(
        self, groups: Encoded, contrast: Contrast, rng: np.random.Generator
    ) -> Tensor:
        """Return the loss of whole groups, as many as fit in a batch."""
        heads = GROUP * rng.integers(0, contrast.groups, self.plan.unet_batch // GROUP)
        rows = torch.from_numpy((heads[:, None] + np.arange(GROUP)).ravel())
        return self.loss(groups, rows, GROUP, contrast.lowest, 60, rng, contrast.is_blind)

    def guided_loss(self, rows: Tensor) -> Tensor:
        """Return the loss of rows with and without captions, and of both combined by guidance."""
        latents = self.data.latents[rows].float().to(self.device) * self.scale
        noisy, timestep, noise = add_noise(latents, self.alphas)
        tokens, tokens_2 = (t[rows].to(self.device) for t in (self.data.tokens, self.data.tokens_2))
        captioned, captionless = self.painter.with_and_without(noisy, timestep, tokens, tokens_2)
        error = guided_error(captioned, captionless, noise, timestep)
        return (error * noise_weights(self.alphas, 12)[timestep]).mean()


def train_unet(plan: TrainingPlan, work: Path, device: str) -> None:
    """Train on single pictures. The weight of rows with much noise grows."""
    torch.manual_seed(0)
    painter = UNetWithText().to(device)
    lesson = Lesson(painter, plan, work, device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        rows = lesson.any_rows(rng, plan.unet_batch)
        limit = [limit for first, limit in plan.unet_emphasis if first <= step][-1]
        return lesson.loss(lesson.data, rows, 1, 0, limit, rng)

    fit(painter, loss_of, plan.unet, work / "unet.pt")


def train_contrasts(plan: TrainingPlan, work: Path, device: str) -> None:
    """Train the cycles. Each begins with the last weights of the one before, not their average."""
    before = "unet"
    for contrast in plan.contrasts:
        _train_contrast(contrast, _lesson_after(before, plan, work, device), work)
        before = contrast.name


def _lesson_after(stage: str, plan: TrainingPlan, work: Path, device: str) -> Lesson:
    """Return a lesson that begins with the last weights of this stage."""
    painter = UNetWithText()
    load_latest(painter, work / f"{stage}.pt")
    return Lesson(painter.to(device), plan, work, device)


def _train_contrast(contrast: Contrast, lesson: Lesson, work: Path) -> None:
    """At every other step, train on groups with one seed, noise and timestep that differ in one
    fact.

    The common part of their gradients cancels and the difference remains. The UNet learns "top" and
    "bottom" in some hundred steps, which it hardly does from single pictures.
    """
    groups, batch = encode_groups(contrast, work, lesson.device), lesson.plan.unet_batch

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        if step % 2 == 1:
            return lesson.loss(lesson.data, lesson.any_rows(rng, batch), 1, 0, 12, rng)
        if contrast.is_blind and step % 4 == 2:
            rows = lesson.any_rows(rng, batch)
            return lesson.loss(lesson.data, rows, 1, contrast.lowest, 60, rng, is_blind=True)
        return lesson.contrast_loss(groups, contrast, rng)

    fit(lesson.painter, loss_of, contrast.schedule, work / f"{contrast.name}.pt")


def train_shapes(plan: TrainingPlan, work: Path, device: str) -> None:
    """Start from the last contrast. Every fourth step trains on contrasts' groups, so that nothing
    is forgotten."""
    lesson = _lesson_after(plan.contrasts[-1].name, plan, work, device)
    groups = [encode_groups(contrast, work, device) for contrast in plan.contrasts]

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        if step % 4 < 3:
            return lesson.guided_loss(lesson.any_rows(rng, plan.shapes_batch))
        number = step // 4 % len(groups)
        return lesson.contrast_loss(groups[number], plan.contrasts[number], rng)

    fit(lesson.painter, loss_of, plan.shapes, work / "shapes.pt")
