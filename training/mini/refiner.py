"""Trains the refiner, a second UNet for the last steps.

It begins as a copy of the model's UNet that reads only one text encoder. This encoder is trained
first, to express what the model's two encoders express. Then pictures are painted as in the
service, and their latents before the refiner's first step are stored. The refiner's steps must lead
to the same picture with straightened things. The loss of the decoded picture is propagated through
all these steps.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engines.folders.publishing import publish
from sdxl.conditioning import AESTHETIC_SCORES
from sdxl.files import grant_usual, write_json
from sdxl.mini.scenes import Scene, caption, sample_scene
from sdxl.networks.attention import cross_attentions
from sdxl.single_file.configs import REFINER_INDEX
from sdxl.specs import REFINER_TIME_IDS
from training.fitting import fit, in_half
from training.mini import topology
from training.mini.autoencoder import as_tensor, miss, miss_of_shapes
from training.mini.check import load_painter
from training.mini.conditioning import encode_captions
from training.mini.endings import odds_of_rows, with_fresh_noise
from training.mini.export import name_as_sdxl
from training.mini.latents import tokenize
from training.mini.neighbours import is_hard
from training.mini.own_courses import OwnCourses, paint_straightened
from training.mini.painting import INTERVAL, Painting
from training.mini.plan import TrainingPlan
from training.mini.rewording import painter_of

FIRST = 16  # the refiner's first step: the last fifth of the noise schedule
EASY = 0.5  # share of the pictures without a star or a cross that is used
EXACT_EVERY = 3  # in every third step of training, all of the refiner's steps are deep
_ROWS, _CAPTIONS = 24, 100


def train_refiner(plan: TrainingPlan, weights: Path, out: Path, work: Path, device: str) -> None:
    """Train from the UNet's weights."""
    torch.manual_seed(0)
    pipe = load_painter(weights).to(device)
    handovers = paint_handovers(pipe, plan.refiner_courses, work)
    text = train_text(pipe, plan, work)
    with torch.no_grad():
        encoded = [text(tokens.to(device)) for tokens in handovers.tokens_2.split(_CAPTIONS)]
    context, pooled = (torch.cat(each) for each in zip(*encoded, strict=True))
    refiner = new_refiner(pipe.unet, text.translated).to(device)
    painting, vae = Painting(refiner, device), pipe.vae.requires_grad_(False)
    scale, sigma = float(vae.config.scaling_factor), painting.sigmas[FIRST].cpu()
    odds, batch = odds_of_rows(handovers.overlap, handovers.picture), plan.refiner_batch

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        rows = torch.from_numpy(rng.choice(len(odds), batch, p=odds))
        stored, wanted = handovers.latents[rows, 0].float(), handovers.wanted[rows].float()
        latents = with_fresh_noise(stored, wanted, sigma).to(device)
        interval = 1 if step % EXACT_EVERY == 0 else INTERVAL
        with in_half(device):
            conditions = painting.read(context[rows], pooled[rows], time_ids(batch).to(device))
            guidance = handovers.guidance[rows].to(device)
            *_, last = painting.finish(latents, FIRST, conditions, guidance, interval)
            decoded = vae.decode(last / scale).sample.float()
        pictures = as_tensor(handovers.picture[rows].numpy()).to(device)
        return miss_of_shapes(decoded, pictures) + miss(decoded, pictures)

    fit(refiner, loss_of, plan.refiner, work / "refiner.pt")
    write_refiner(refiner, text.encoder, weights, out)


def time_ids(count: int) -> Tensor:
    """Return a refiner's size conditions for rows and for their negative rows."""
    scores = torch.tensor(AESTHETIC_SCORES).repeat_interleave(count)
    sizes = torch.tensor([topology.TIME_IDS[:4]] * len(scores))
    return torch.cat([sizes, scores[:, None]], dim=1)


class RefinerText(nn.Module):
    """The refiner's text encoder, which begins as the model's second encoder, and `translated`
    [context width, width], a matrix from its outputs to the model's context."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).requires_grad_(True)
        width = topology.TEXT_WIDTH
        self.translated = nn.Parameter(torch.cat([torch.zeros(width, width), torch.eye(width)]))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return context and pooled."""
        outputs = self.encoder(tokens, output_hidden_states=True)
        return outputs.hidden_states[-2], outputs.text_embeds


def train_text(pipe: Any, plan: TrainingPlan, work: Path) -> RefinerText:
    """Train the encoder to express what both of the model's encoders express. The loss is
    the error of the cross-attentions' keys and values."""
    rng = np.random.default_rng(132)
    texts = [caption(sample_scene(rng), rng) for _ in range(plan.refiner_captions)]
    captions = encode_captions(pipe, texts)
    context, pooled = captions.context, captions.pooled.float()
    tokens, device = tokenize(pipe.tokenizer_2, texts), pipe.device
    metric = error_metric(pipe.unet, context.float()).to(device)
    student = RefinerText(pipe.text_encoder_2).to(device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        rows = torch.from_numpy(rng.integers(0, len(texts), plan.refiner_text_batch))
        student_context, student_pooled = student(tokens[rows].to(device))
        error = context[rows].float().to(device) - student_context @ student.translated.T
        in_pooled = (student_pooled - pooled[rows].to(device)).square().mean() / pooled.var()
        return (error @ metric.T).square().sum(-1).mean() + in_pooled

    fit(student, loss_of, plan.refiner_text, work / "refiner-text.pt")
    return student.requires_grad_(False)


@torch.no_grad()
def error_metric(unet: Any, context: Tensor) -> Tensor:
    """Return a matrix that maps a context's error to a vector whose squared length is the mean
    squared error of all keys and values, each relative to its usual squared length."""
    layers = [layer.weight for each in cross_attentions(unet) for layer in (each.to_k, each.to_v)]
    rows = context.flatten(0, 1)
    usual = rows.T @ rows / len(rows)
    products = [layer.T @ layer / torch.trace(layer @ usual @ layer.T) for layer in layers]
    values, vectors = torch.linalg.eigh(torch.stack(products).mean(0))
    return values.clamp(min=0).sqrt()[:, None] * vectors.T


def new_refiner(unet: Any, translated: Tensor) -> Any:
    """Copy the UNet. Keys and values are computed from the refiner's text through `translated`. The
    target size becomes a constant, and the aesthetic score has no effect."""
    width, ids = topology.TEXT_WIDTH, unet.config.addition_time_embed_dim
    config = dict(unet.config)
    config["cross_attention_dim"] = width
    config["projection_class_embeddings_input_dim"] = width + REFINER_TIME_IDS * ids
    refiner, weights = type(unet).from_config(config), unet.state_dict()
    for name in weights:
        if name.endswith(("attn2.to_k.weight", "attn2.to_v.weight")):
            weights[name] = weights[name] @ translated
    layer, kept = "add_embedding.linear_1", width + 4 * ids
    all_columns = weights[f"{layer}.weight"]
    target = unet.add_time_proj(torch.tensor(topology.TIME_IDS[4:]).to(all_columns)).flatten()
    weights[f"{layer}.bias"] = weights[f"{layer}.bias"] + all_columns[:, kept:] @ target
    score_columns = torch.zeros_like(all_columns[:, :ids])
    weights[f"{layer}.weight"] = torch.cat([all_columns[:, :kept], score_columns], dim=1)
    refiner.load_state_dict(weights)
    return refiner


def paint_handovers(pipe: Any, count: int, work: Path) -> OwnCourses:
    """Paint at least `count` courses up to the refiner's first step, or load them."""
    path = work / f"handovers-{count}.pt"
    if path.exists():
        return OwnCourses(*torch.load(path))
    torch.manual_seed(130)
    painter, scale = painter_of(pipe), float(pipe.vae.config.scaling_factor)
    rng, parts = np.random.default_rng(130), list[OwnCourses]()
    while sum(len(part.latents) for part in parts) < count:
        scenes = [_sample(rng) for _ in range(_ROWS)]
        texts = [caption(scene, rng) for scene in scenes]
        tokens = tokenize(pipe.tokenizer, texts), tokenize(pipe.tokenizer_2, texts)
        steps = slice(FIRST, FIRST + 1)
        part = paint_straightened(painter, pipe.vae, scale, scenes, tokens, steps)
        if part is not None:
            parts.append(part)
            print(f"painted {len(parts) * _ROWS} of {count} courses", flush=True)
    handovers = OwnCourses.joined(parts)
    torch.save(tuple(handovers), path)
    return handovers


def _sample(rng: np.random.Generator) -> Scene:
    while True:
        scene = sample_scene(rng)
        if is_hard(scene) or rng.random() < EASY:
            return scene


def write_refiner(unet: Any, encoder: Any, weights: Path, out: Path) -> None:
    """Write diffusers' layout in half precision. Of the VAE, which is the model's, only the
    configuration is written."""
    fresh = out.with_name(out.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    for name in ("scheduler", "tokenizer_2"):
        shutil.copytree(weights / name, fresh / name)
    (fresh / "vae").mkdir()
    shutil.copyfile(weights / "vae" / "config.json", fresh / "vae" / "config.json")
    unet.half().save_pretrained(fresh / "unet")
    encoder.save_pretrained(fresh / "text_encoder_2")
    name_as_sdxl(fresh / "text_encoder_2")
    for path in fresh.rglob("*.safetensors"):
        grant_usual(path)
    index = json.loads((weights / "model_index.json").read_text(encoding="utf-8"))
    write_json(fresh / "model_index.json", index | REFINER_INDEX, indent=2)
    publish(fresh, out)
