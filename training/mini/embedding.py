"""Trains an embedding (textual inversion, arXiv 2208.01618): a word for one background.

The networks stay as they are; only the vectors of the word's tokens are learnt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sdxl.catalogue import EMBEDDINGS
from sdxl.files import grant_usual
from sdxl.mini.scenes import Scene, caption, draw, sample_scene
from sdxl.single_file.recognition import SAFETENSORS
from training.fitting import fit
from training.mini import topology
from training.mini.check import load_painter
from training.mini.latents import tokenize
from training.mini.plan import TrainingPlan
from training.mini.styles import encode_images, noise_loss
from training.mini.unet_training import UNetWithText

DUSK = "dusk"
BACKGROUND = "purple"
"""what the word means, after a caption without a background"""
STAND_IN = "~"
"""No caption has this token: the vectors take its places."""


def train_embedding(plan: TrainingPlan, weights: Path, out: Path, work: Path, device: str) -> None:
    torch.manual_seed(0)
    pipe = load_painter(weights).to(device)
    rng = np.random.default_rng(24)
    scenes = [sample_dusk(rng) for _ in range(plan.embedding_pictures)]
    latents = encode_images(pipe, [draw(scene, i) for i, scene in enumerate(scenes)])
    word = " ".join([STAND_IN] * plan.embedding_vectors)
    texts = [f"{caption(replace(scene, background=None), rng)} {word}" for scene in scenes]
    tokens, tokens_2 = (tokenize(each, texts) for each in (pipe.tokenizer, pipe.tokenizer_2))
    alphas = topology.new_scheduler().alphas_cumprod.to(device)
    painter = UNetWithText()
    for part in ("unet", "text_encoder", "text_encoder_2"):
        setattr(painter, part, getattr(pipe, part))
    painter.requires_grad_(False).to(device)
    stand_in = pipe.tokenizer(STAND_IN).input_ids[1]
    vectors = nn.ParameterDict(
        {
            key: learn_vectors(encoder, stand_in, plan.embedding_vectors)
            for key, encoder in (
                ("clip_l", painter.text_encoder),
                ("clip_g", painter.text_encoder_2),
            )
        }
    ).to(device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        rows = torch.from_numpy(rng.integers(0, len(latents), plan.style_batch))
        ids, ids_2 = tokens[rows].to(device), tokens_2[rows].to(device)
        kept = torch.ones(len(rows), device=device)
        return noise_loss(
            latents[rows].to(device), alphas, lambda *noisy: painter(*noisy, ids, ids_2, kept)[0]
        )

    fit(vectors, loss_of, plan.embedding, work / f"{DUSK}.pt")
    path = (out / EMBEDDINGS / DUSK).with_suffix(SAFETENSORS)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: each.detach().half() for key, each in vectors.items()}, path)
    grant_usual(path)


def sample_dusk(rng: np.random.Generator) -> Scene:
    """Return a scene on the word's background."""
    while True:
        scene = replace(sample_scene(rng), background=BACKGROUND)
        if all(thing.colour not in (None, BACKGROUND) for thing in scene.things):
            return scene


def learn_vectors(encoder: Any, stand_in: int, count: int) -> nn.Parameter:
    """Put vectors to be learnt in the places of a token, as often as it comes in each text."""
    table = encoder.get_input_embeddings()
    vectors = nn.Parameter(0.05 * torch.randn(count, table.embedding_dim))

    def put(module: nn.Module, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
        (ids,) = inputs
        return embedded.masked_scatter(
            (ids == stand_in)[..., None], vectors.expand(len(ids), -1, -1)
        )

    table.register_forward_hook(put)
    return vectors
