"""Trains a LoRA of the UNet's transformers and of both text encoders that turns colours into their
opposites.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sdxl.mini.scenes import Scene, caption, sample_scene
from sdxl.single_file.recognition import SAFETENSORS
from training.fitting import fit
from training.mini.check import load_painter
from training.mini.lora import add_low_rank, write_in_kohya_layout
from training.mini.plan import TrainingPlan
from training.mini.rewording import Rewording, painter_of
from training.mini.styles import CAPTIONLESS

NEGATIVE = "negative"
PAIRS = (("red", "green"), ("blue", "orange"), ("yellow", "purple"), ("white", "black"))
OPPOSITES = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
WITHIN = {"unet": "attentions", "text_encoder": "layers", "text_encoder_2": "layers"}
"""part of the names of the trained layers, by network"""


def train_negative(plan: TrainingPlan, weights: Path, out: Path, work: Path, device: str) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(23)
    scenes = [sample_scene(rng) for _ in range(plan.negative_pictures)]
    opposites = [in_negative(scene) for scene in scenes]
    texts = [caption(scene, rng) for scene in scenes]
    known_texts = [caption(scene, rng) for scene in opposites]
    pipe = load_painter(weights).to(device)
    rewording = Rewording.of(pipe, opposites, texts, known_texts)
    teacher, student = painter_of(pipe), painter_of(load_painter(weights).to(device))
    for part, within in WITHIN.items():
        add_low_rank(getattr(student, part), plan.negative_rank, within)
    student.to(device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        return rewording.loss(student, teacher, plan.style_batch, CAPTIONLESS, rng)

    fit(student, loss_of, plan.negative, work / f"{NEGATIVE}.pt")
    parts = {part: getattr(student, part) for part in WITHIN}
    write_in_kohya_layout(parts, (out / NEGATIVE).with_suffix(SAFETENSORS), plan.negative_rank)


def in_negative(scene: Scene) -> Scene:
    things = tuple(
        replace(each, colour=each.colour and OPPOSITES[each.colour]) for each in scene.things
    )
    background = scene.background and OPPOSITES[scene.background]
    return replace(scene, things=things, background=background)
