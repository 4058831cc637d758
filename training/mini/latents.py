"""The UNet's training data: drawn pictures as latents, encoded once, and their captions' tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPTokenizer

from sdxl.mini.scenes import Scene, caption, draw, sample_scene
from sdxl.single_file.configs import END
from training.fitting import in_half
from training.mini.autoencoder import as_tensor, load_vae
from training.mini.neighbours import sample_group
from training.mini.plan import GROUP, Contrast, TrainingPlan
from training.mini.vocabulary import write_tokenizer


@dataclass(frozen=True)
class Encoded:
    """Unscaled latents of pictures, their 16×16 thumbnails, and their captions' tokens."""

    latents: Tensor
    thumbnails: Tensor
    tokens: Tensor
    tokens_2: Tensor

    @property
    def scale(self) -> float:
        return 1 / float(self.latents.float().std())


def tokenizers(work: Path) -> tuple[CLIPTokenizer, CLIPTokenizer]:
    """Write both tokenizers, like the export, and load them."""
    write_tokenizer(work / "tokenizer", END)
    write_tokenizer(work / "tokenizer_2", "!")
    first, second = (CLIPTokenizer.from_pretrained(work / f"tokenizer{n}") for n in ("", "_2"))
    return first, second


def tokenize(tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    encoding = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
    return torch.as_tensor(encoding.input_ids)


def encode_pictures(plan: TrainingPlan, work: Path, device: str) -> Encoded:
    """Draw and encode the UNet's pictures. They are encoded once, not in each training step."""
    scenes, rng = sample_pictures(plan)
    numbered = [(scene, i) for i, scene in enumerate(scenes)]
    return _encode(numbered, rng, work / f"latents-{plan.pictures}.pt", work, device)


def sample_pictures(plan: TrainingPlan) -> tuple[list[Scene], np.random.Generator]:
    """Return the scenes, whose numbers are their drawings' seeds, and the captions' generator."""
    rng = np.random.default_rng(plan.pictures_seed)
    return [sample_scene(rng) for _ in range(plan.pictures)], rng


def encode_groups(contrast: Contrast, work: Path, device: str) -> Encoded:
    """Draw and encode groups. A group's scenes share their drawing's seed and differ in one
    attribute."""
    rng = np.random.default_rng(contrast.seed)
    groups = [sample_group(rng, GROUP, contrast.place_share) for _ in range(contrast.groups)]
    scenes = [(scene, 10**6 + i) for i, group in enumerate(groups) for scene in group]
    return _encode(scenes, rng, work / f"{contrast.name}-latents.pt", work, device)


@torch.no_grad()
def _encode(
    scenes: list[tuple[Scene, int]], rng: np.random.Generator, path: Path, work: Path, device: str
) -> Encoded:
    if path.exists():
        return Encoded(**torch.load(path))
    vae = load_vae(work).to(device)
    latents, thumbnails = [], []
    for start in range(0, len(scenes), 50):
        drawn = [draw(scene, seed) for scene, seed in scenes[start : start + 50]]
        images = as_tensor(np.stack(drawn)).to(device)
        with in_half(device):
            latents.append(vae.encode(images).latent_dist.mean.half().cpu())
        thumbnails.append(F.avg_pool2d(images, 8).half().cpu())
        if start % 2000 == 0:
            print(f"encoded {start} of {len(scenes)} pictures", flush=True)
    first, second = tokenizers(work)
    texts = [caption(scene, rng) for scene, _ in scenes]
    parts = {
        "latents": torch.cat(latents),
        "thumbnails": torch.cat(thumbnails),
        "tokens": tokenize(first, texts),
        "tokens_2": tokenize(second, texts),
    }
    torch.save(parts, path)
    return Encoded(**parts)


def fit_preview(data: Encoded) -> dict[str, object]:
    """Fit a least-squares map from latent channels to colours, for previews without a VAE."""
    sample = slice(0, 2000)
    latents = (data.latents[sample].float() * data.scale).movedim(1, -1).flatten(0, 2)
    colours = data.thumbnails[sample].float().movedim(1, -1).flatten(0, 2)
    inputs = torch.cat([latents, torch.ones(len(latents), 1)], dim=1)
    solution = torch.linalg.lstsq(inputs, colours).solution
    rounded = [[round(float(value), 5) for value in row] for row in solution]
    return {
        "about": "rgb in -1..1 = scaled latents (as the UNet sees them) @ factors + bias",
        "latent_rgb_factors": rounded[:-1],
        "latent_rgb_bias": rounded[-1],
    }
