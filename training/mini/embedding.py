"""Trains an embedding (textual inversion, arXiv 2208.01618): a word for one background.

Only the word's vectors are trained, one for each text encoder.
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
from sdxl.mini.scenes import Scene, caption, pick, sample_scene
from sdxl.single_file.recognition import SAFETENSORS
from training.fitting import fit
from training.mini.check import load_painter
from training.mini.plan import TrainingPlan
from training.mini.rewording import Rewording, painter_of

DUSK = "dusk"
BACKGROUND = "purple"
"""the meaning of the word, in a caption without a background"""
WORDINGS = ("{} ~", "{}, ~")
"""places of the word in captions"""
STAND_IN = "~"
"""a token that no caption has; the vector replaces its embedding"""


def train_embedding(plan: TrainingPlan, weights: Path, out: Path, work: Path, device: str) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(24)
    scenes = [sample_dusk(rng) for _ in range(plan.embedding_pictures)]
    known_texts = [caption(scene, rng) for scene in scenes]
    bare = [without_background(scene, rng) for scene in scenes]
    pipe = load_painter(weights).to(device)
    texts = [pick(rng, WORDINGS).format(text) for text in bare]
    rewording, painter = Rewording.of(pipe, scenes, texts, known_texts), painter_of(pipe)
    stand_in = pipe.tokenizer(STAND_IN).input_ids[1]
    encoders = {"clip_l": painter.text_encoder, "clip_g": painter.text_encoder_2}
    vectors = nn.ParameterDict(
        {key: learn_vector(encoder, stand_in) for key, encoder in encoders.items()}
    )

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        return rewording.loss(painter, painter, plan.style_batch, 0, rng)

    fit(vectors, loss_of, plan.embedding, work / f"{DUSK}.pt")
    path = (out / EMBEDDINGS / DUSK).with_suffix(SAFETENSORS)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: each.detach().half().cpu()[None] for key, each in vectors.items()}, path)
    grant_usual(path)


def sample_dusk(rng: np.random.Generator, held_out: bool = False) -> Scene:
    """Return a scene on the word's background."""
    while True:
        scene = replace(sample_scene(rng, held_out), background=BACKGROUND)
        colours = {thing.colour for thing in scene.things}
        if not colours & {None, BACKGROUND} and scene.is_held_out == held_out:
            return scene


def without_background(scene: Scene, rng: np.random.Generator | None = None) -> str:
    return caption(replace(scene, background=None), rng)


def learn_vector(encoder: Any, stand_in: int) -> nn.Parameter:
    """Replace this token's embedding by a vector to train; return the vector."""
    table = encoder.get_input_embeddings()
    vector = nn.Parameter(table.weight.new_empty(table.embedding_dim).normal_(std=0.05))

    def put(module: nn.Module, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
        (ids,) = inputs
        return torch.where((ids == stand_in)[..., None], vector, embedded)

    table.register_forward_hook(put)
    return vector
