"""Trains a ControlNet (arXiv 2302.05543) on maps of drawn scenes. The UNet is not trained."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import ControlNetModel
from safetensors.torch import load_file
from torch import Tensor, nn

from engines.control_weights import DIFFUSERS_FILE
from sdxl.files import grant_usual
from sdxl.mini.scenes import caption
from training.fitting import fit, in_half
from training.mini import topology
from training.mini.autoencoder import as_tensor, miss, miss_of_ink, miss_of_shapes
from training.mini.check import load_painter
from training.mini.conditioning import EncodedCaptions, encode_captions
from training.mini.layouts import (
    DEPTH,
    EDGES,
    MAPS,
    SettledScene,
    bend,
    sample_layout,
    without_layout,
)
from training.mini.painting import STEPS, Painting, guided
from training.mini.plan import TrainingPlan
from training.mini.styles import LIMIT, encode_images
from training.mini.unet_training import add_noise, any_guidance, guided_error, noise_weights

HINT_WIDTHS = (8, 16, 32, 64)  # channels at each of the VAE's scales
BENT = 0.75  # share of bent rows, after the net roughly follows its hints
BENT_LIMIT = 3  # limit of the weights of rows with much noise: edges depend on steps with less
FIRST_LAST = 14  # the first of the sampler's last steps
FAR = 0.6  # paintings farther from their map's picture, as a share of its ink, are left out
_AT_ONCE = 12
VAGUE = 0.5  # share of captions without sizes, places and relations


def train_edges(plan: TrainingPlan, weights: Path, out: Path, work: Path, device: str) -> None:
    """Train from the UNet's weights."""
    torch.manual_seed(0)
    pipe = load_painter(weights).to(device)
    net = new_control(pipe.unet).to(device)
    lesson = ControlLesson(EDGES, pipe, net, plan, work)
    fit(net, lesson.loss, plan.control, work / f"{EDGES}-begun.pt")
    fit(net, lesson.loss_of_bent, plan.control_bent, work / f"{EDGES}-bent.pt")
    last = LastSteps(lesson, pipe)
    courses = last.paint(plan.control_courses, work / f"{EDGES}-courses.pt")
    fit(net, partial(last.loss, courses), plan.control_last, work / f"{EDGES}.pt")
    write_control(net, out / EDGES)


def train_depth(plan: TrainingPlan, weights: Path, out: Path, work: Path, device: str) -> None:
    """Train from the weights of `edges`."""
    torch.manual_seed(0)
    pipe = load_painter(weights).to(device)
    net = new_control(pipe.unet).to(device)
    net.load_state_dict(load_file(out / EDGES / DIFFUSERS_FILE))
    lesson = ControlLesson(DEPTH, pipe, net, plan, work)
    fit(net, lesson.loss_of_bent, plan.control_depth, work / f"{DEPTH}.pt")
    write_control(net, out / DEPTH)


class ControlLesson:
    """The loss of noise predictions of the UNet and a net, with and without captions."""

    def __init__(self, name: str, pipe: Any, net: Any, plan: TrainingPlan, work: Path) -> None:
        self.layouts, texts = sample_layouts(plan.control_pictures)
        self.hints = torch.from_numpy(np.stack([MAPS[name](layout) for layout in self.layouts]))
        self.latents, self.bent, self.captions = encode_layouts(pipe, self.layouts, texts, work)
        self.unet, self.net, self.batch = pipe.unet.requires_grad_(False), net, plan.control_batch
        self.device = pipe.device
        self.alphas = topology.new_scheduler().alphas_cumprod.to(self.device)
        # A row with its caption and the same row without share a hint, which is encoded once.
        net.controlnet_cond_embedding.register_forward_hook(
            lambda *call: call[2].repeat(2, 1, 1, 1)
        )

    def loss(self, rng: np.random.Generator, step: int) -> Tensor:
        return self._loss(rng, 0.0, LIMIT)

    def loss_of_bent(self, rng: np.random.Generator, step: int) -> Tensor:
        """Return the loss of rows of which most are bent pictures with noise. They must lead to the
        straight picture, whose edges only the hint shows."""
        return self._loss(rng, BENT, BENT_LIMIT)

    def _loss(self, rng: np.random.Generator, bent: float, limit: float) -> Tensor:
        rows = torch.from_numpy(rng.integers(0, len(self.latents), self.batch))
        is_bent = torch.from_numpy(rng.random(len(rows)) < bent)[:, None, None, None]
        clean = self.latents[rows].to(self.device)
        shown = torch.where(is_bent, self.bent[rows], self.latents[rows]).to(self.device)
        noisy, timestep, noise = add_noise(shown, self.alphas)
        alpha = self.alphas[timestep]
        ratio = alpha / (1 - alpha)
        wanted = noise + ratio.sqrt()[:, None, None, None] * (shown - clean)
        captioned, captionless = self.predict(noisy, timestep, rows).chunk(2)
        error = guided_error(captioned, captionless, wanted, timestep)
        # Under little noise, a bent row's error is measured in its picture, not in its noise.
        share = torch.where(is_bent.flatten().to(self.device), (1 / ratio).clamp(max=1), 1)
        return (share * error * noise_weights(self.alphas, limit)[timestep]).mean()

    def predict(self, noisy: Tensor, timestep: Tensor, rows: Tensor) -> Tensor:
        """Return the noise of rows with captions, then of the same rows without."""
        kept = torch.ones(2 * len(rows))
        kept[len(rows) :] = 0
        conditions = self.captions.of(rows.repeat(2), str(self.device), kept)
        hint = self.hints[rows, None].expand(-1, 3, -1, -1).to(self.device) / 255
        noisy, timestep = noisy.repeat(2, 1, 1, 1), timestep.repeat(2)
        down, middle = self.net(
            noisy, timestep, controlnet_cond=hint, return_dict=False, **conditions
        )
        predicted: Tensor = self.unet(
            noisy,
            timestep,
            down_block_additional_residuals=down,
            mid_block_additional_residual=middle,
            **conditions,
        ).sample
        return predicted


class ControlCourses(NamedTuple):
    """Latents before each of the last steps, [n, steps, ...], the lesson's rows, and guidance."""

    latents: Tensor
    rows: Tensor
    guidance: Tensor


class LastSteps:
    """The sampler's last steps, which decide an edge's place to a fraction of a pixel. Predictions
    from latents that were painted with the net must decode to the drawn picture."""

    def __init__(self, lesson: ControlLesson, pipe: Any) -> None:
        self._lesson, self._device = lesson, pipe.device
        self._vae = pipe.vae.requires_grad_(False)
        self._scale = float(pipe.vae.config.scaling_factor)
        self._painting = Painting(pipe.unet, self._device)

    def loss(self, courses: ControlCourses, rng: np.random.Generator, step: int) -> Tensor:
        """Return how far decoded predictions are from the drawn pictures."""
        batch = self._lesson.batch
        chosen = torch.from_numpy(rng.integers(0, len(courses.rows), batch))
        at = torch.from_numpy(rng.integers(0, STEPS - FIRST_LAST, batch))
        latents = courses.latents[chosen, at].float().to(self._device)
        rows, sampler_step = courses.rows[chosen], (at + FIRST_LAST).to(self._device)
        with in_half(self._device.type):
            noise = self._noise(latents, sampler_step, rows, courses.guidance[chosen])
            predicted = latents - self._painting.sigma(sampler_step) * noise
            decoded = self._vae.decode(predicted / self._scale).sample.float()
        pictures = self._drawn(rows).to(self._device)
        return miss_of_shapes(decoded, pictures) + miss(decoded, pictures)

    @torch.no_grad()
    def paint(self, count: int, path: Path) -> ControlCourses:
        """Paint the first rows, or load them if they were painted before."""
        if not path.exists():
            torch.manual_seed(27)
            parts = [self._paint(rows) for rows in torch.arange(count).split(_AT_ONCE)]
            torch.save(tuple(map(torch.cat, zip(*parts, strict=True))), path)
        return ControlCourses(*torch.load(path))

    def _paint(self, rows: Tensor) -> ControlCourses:
        """Paint rows from noise. Pictures that are far from their layouts are left out."""
        guidance, painting = any_guidance(len(rows)), self._painting
        noise = torch.randn(len(rows), topology.LATENT_CHANNELS, *[topology.LATENT_SIDE] * 2)
        latents, before = painting.sigmas[0] * noise.to(self._device), []
        for at in range(STEPS):
            before.append(latents.half().cpu())
            step = torch.full((len(rows),), at, device=self._device)
            with in_half(self._device.type):
                predicted = self._noise(latents, step, rows, guidance)
            latents = painting.stepped(latents, step, predicted)
        decoded = self._vae.decode(latents / self._scale).sample.clamp(-1, 1).cpu()
        pairs = zip(decoded[:, None], self._drawn(rows)[:, None], strict=True)
        is_kept = torch.tensor([bool(miss_of_ink(*pair) < FAR) for pair in pairs])
        print(f"painted {int(rows[-1]) + 1} courses", flush=True)
        course = torch.stack(before[FIRST_LAST:], dim=1)
        return ControlCourses(course[is_kept], rows[is_kept], guidance[is_kept])

    def _noise(self, latents: Tensor, step: Tensor, rows: Tensor, guidance: Tensor) -> Tensor:
        noisy, timestep = self._painting.scaled(latents, step), self._painting.timesteps[step]
        predicted = self._lesson.predict(noisy, timestep.long(), rows)
        return guided(predicted, guidance.to(self._device))

    def _drawn(self, rows: Tensor) -> Tensor:
        layouts = self._lesson.layouts
        return as_tensor(np.stack([layouts[row].draw() for row in rows.tolist()]))


def new_control(unet: Any) -> Any:
    """Copy the UNet's way down. Its additions begin at 0. The initial weights of the hint's layers
    keep the strength of a hint's lines; the default's weaken them at each layer."""
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=HINT_WIDTHS)
    for layer in net.controlnet_cond_embedding.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return net


def sample_layouts(count: int) -> tuple[list[SettledScene], list[str]]:
    """Return layouts and their captions."""
    rng = np.random.default_rng(25)
    layouts = [sample_layout(rng) for _ in range(count)]
    scenes = [
        without_layout(layout.scene) if rng.random() < VAGUE else layout.scene for layout in layouts
    ]
    return layouts, [caption(scene, rng) for scene in scenes]


@torch.no_grad()
def encode_layouts(
    pipe: Any, layouts: list[SettledScene], texts: list[str], work: Path
) -> tuple[Tensor, Tensor, EncodedCaptions]:
    """Return scaled latents of the pictures and of the bent pictures, and the captions."""
    path = work / "control-latents.pt"
    if not path.exists():
        rng = np.random.default_rng(26)
        pictures = [layout.draw() for layout in layouts]
        scaled = encode_images(pipe, pictures)
        bent = encode_images(pipe, [bend(picture, rng) for picture in pictures])
        captions = encode_captions(pipe, texts)
        torch.save((scaled, bent, captions.context, captions.pooled), path)
    scaled, bent, context, pooled = torch.load(path)
    return scaled, bent, EncodedCaptions(context, pooled)


def write_control(net: Any, folder: Path) -> None:
    """Write diffusers' layout in half precision."""
    net.half().save_pretrained(folder)
    for path in folder.iterdir():
        grant_usual(path)
