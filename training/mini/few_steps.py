"""Trains a LoRA that paints in four unguided steps the pictures that the UNet paints in twenty
guided steps.

The teacher's latents after each fourth of its steps are stored. The student learns to go from each
of these to the next in one step of the same solver: Progressive Distillation (arXiv 2202.00512) in
one stage with fixed steps, as in SDXL-Lightning (2402.13929), without its adversary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import EulerDiscreteScheduler
from torch import Tensor

from sdxl.mini.scenes import caption, sample_scene
from training.fitting import fit
from training.mini import topology
from training.mini.check import load_painter
from training.mini.conditioning import EncodedCaptions, encode_captions
from training.mini.lora import add_low_rank, write_in_diffusers_layout
from training.mini.plan import TrainingPlan

STEPS, TEACHER_STEPS, TEACHER_GUIDANCE = 4, 20, 5.0


def trailing(steps: int) -> EulerDiscreteScheduler:
    """Return a scheduler that begins at the last timestep. Each of the student's steps then begins
    and ends at a step of the teacher."""
    config = topology.new_scheduler().config
    scheduler = EulerDiscreteScheduler.from_config(config, timestep_spacing="trailing")
    scheduler.set_timesteps(steps)
    return scheduler


def train_few_steps(plan: TrainingPlan, weights: Path, out: Path, work: Path, device: str) -> None:
    torch.manual_seed(0)
    courses, captions = paint_courses(plan, weights, work, device)
    student = load_painter(weights).unet
    add_low_rank(student, plan.few_steps_rank)
    student.to(device)
    scheduler = trailing(STEPS)
    sigmas, timesteps = scheduler.sigmas.float(), scheduler.timesteps

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        """Return the error of a step's result, as a share of the noise at its end."""
        rows = torch.from_numpy(rng.integers(0, len(courses), plan.few_steps_batch))
        node = torch.from_numpy(rng.integers(0, STEPS, plan.few_steps_batch))
        before, after = (courses[rows, node + i].to(device) for i in (0, 1))
        level, level_after = (sigmas[node + i].to(device).view(-1, 1, 1, 1) for i in (0, 1))
        predicted = student(
            before / (level**2 + 1).sqrt(), timesteps[node].to(device), **captions.of(rows, device)
        ).sample
        result = before + (level_after - level) * predicted
        return ((result - after) / (level_after**2 + 1).sqrt()).square().mean()

    fit(student, loss_of, plan.few_steps, work / "few_steps.pt")
    write_in_diffusers_layout(student, out / "few_steps")


def paint_courses(
    plan: TrainingPlan, weights: Path, work: Path, device: str
) -> tuple[Tensor, EncodedCaptions]:
    """Return the teacher's latents [n, STEPS + 1, ...] where the student's steps begin and end, and
    their captions. They are painted and stored in parts, because it takes long."""
    pipe = load_painter(weights).to(device)
    pipe.scheduler = trailing(TEACHER_STEPS)
    parts = []
    for start in range(0, plan.courses, plan.courses_batch):
        path = work / f"courses-{plan.courses_batch}-{start}.pt"
        if not path.exists():
            torch.save(_paint_part(pipe, start, plan.courses_batch), path)
            print(f"painted the courses of {start + plan.courses_batch} pictures", flush=True)
        parts.append(torch.load(path))
    latents, context, pooled = (
        torch.cat([part[name] for part in parts]) for name in ("latents", "context", "pooled")
    )
    return latents, EncodedCaptions(context, pooled)


@torch.no_grad()
def _paint_part(pipe: Any, start: int, count: int) -> dict[str, Tensor]:
    rng = np.random.default_rng((21, start))
    texts = [caption(sample_scene(rng), rng) for _ in range(count)]
    captions = encode_captions(pipe, texts)
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    shape = (count, topology.LATENT_CHANNELS, *[topology.LATENT_SIDE] * 2)
    noise = torch.randn(shape, generator=generator)
    nodes = [noise * float(pipe.scheduler.init_noise_sigma)]

    def keep(_: Any, step: int, __: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if (step + 1) % (TEACHER_STEPS // STEPS) == 0:
            nodes.append(tensors["latents"].cpu())
        return tensors

    pipe(
        texts,
        latents=noise.to(pipe.device),
        num_inference_steps=TEACHER_STEPS,
        guidance_scale=TEACHER_GUIDANCE,
        output_type="latent",
        callback_on_step_end=keep,
    )
    return {
        "latents": torch.stack(nodes, dim=1),
        "context": captions.context,
        "pooled": captions.pooled,
    }
