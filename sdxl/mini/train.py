"""Trains the embedded model from nothing: `python -m sdxl.mini.train --out DIR`.

Stages, in order: the VAE, the UNet with both text encoders, the scorer, then the export of a
diffusers folder. Each stage resumes from its checkpoint in `--work`, so naming a stage again
costs nothing once it is done. Everything is drawn; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTokenizer

from sdxl.mini import topology
from sdxl.mini.clip import train_scorer
from sdxl.mini.export import Trained, export
from sdxl.mini.fitting import Schedule, fit, load_fitted
from sdxl.mini.scenes import SIDE, caption, draw, sample_scene
from sdxl.mini.vocabulary import EOS, write_tokenizer

CROP = 64
EMPTY_ZEROED, EMPTY_ENCODED = 0.10, 0.02  # SDXL's own way to say nothing, and the plain way
OFFSET_NOISE = 0.25
STAGES = ("vae", "unet", "scorer", "export")


_VAE = Schedule(steps=2600, peak_rate=2e-3, seed=1)
_UNET = Schedule(steps=8000, peak_rate=1e-3, seed=2)
_SCORER = Schedule(steps=1500, peak_rate=1e-3, seed=3)


@dataclass(frozen=True)
class Plan:
    """The lengths and seeds behind the weights in the repository."""

    vae: Schedule = _VAE
    unet: Schedule = _UNET
    scorer: Schedule = _SCORER
    pictures: int = 30_000
    pictures_seed: int = 4
    vae_batch: int = 16  # crops; a whole picture takes the place of four
    vae_whole_from: int = 1600
    unet_batch: int = 32
    scorer_groups: int = 32  # of a scene and three that differ from it in one attribute


def as_tensor(images: np.ndarray) -> Tensor:
    """uint8 NHWC to float NCHW in −1…1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def _crops(rng: np.random.Generator, count: int, side: int) -> np.ndarray:
    crops = []
    for _ in range(count):
        image = draw(sample_scene(rng), int(rng.integers(2**31)))
        x, y = rng.integers(0, SIDE - side + 1, 2)
        crops.append(image[y : y + side, x : x + side])
    return np.stack(crops)


def train_vae(plan: Plan, work: Path, device: str) -> None:
    """Through the mean and a little noise, as a sampled posterior drowns at the start.

    Crops teach it quickly; whole pictures, mixed in later, teach it wide plain backgrounds.
    """
    torch.manual_seed(0)
    vae = topology.new_vae().to(device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        is_whole = step >= plan.vae_whole_from and step % 2 == 1
        side, count = (SIDE, plan.vae_batch // 4) if is_whole else (CROP, plan.vae_batch)
        images = as_tensor(_crops(rng, count, side)).to(device)
        with torch.autocast(device, torch.bfloat16):
            posterior = vae.encode(images).latent_dist
            decoded = vae.decode(posterior.mean + 0.05 * torch.randn_like(posterior.mean)).sample
        error = decoded.float() - images
        spread = (posterior.logvar.float() + 6).square().mean()
        size = posterior.mean.float().square().mean()
        return error.abs().mean() + 2 * error.square().mean() + 1e-3 * spread + 1e-4 * size

    fit(vae, loss_of, plan.vae, work / "vae.pt")


def load_vae(work: Path) -> AutoencoderKL:
    vae = topology.new_vae()
    load_fitted(vae, work / "vae.pt")
    return vae


@dataclass(frozen=True)
class Encoded:
    """Pictures as unscaled latents, their 16×16 thumbnails, and their captions' tokens."""

    latents: Tensor
    thumbnails: Tensor
    tokens: Tensor
    tokens_2: Tensor

    @property
    def scale(self) -> float:
        return 1 / float(self.latents.float().std())


def tokenizers(work: Path) -> tuple[CLIPTokenizer, CLIPTokenizer]:
    """Writes both, as the export will, and loads them."""
    write_tokenizer(work / "tokenizer", EOS)
    write_tokenizer(work / "tokenizer_2", "!")
    return (
        CLIPTokenizer.from_pretrained(work / "tokenizer"),
        CLIPTokenizer.from_pretrained(work / "tokenizer_2"),
    )


def tokenize(tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    found = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
    return torch.as_tensor(found.input_ids)


@torch.no_grad()
def encode_pictures(plan: Plan, work: Path, device: str) -> Encoded:
    """Draw and encode the UNet's pictures once; its steps then cost nothing but the UNet."""
    path = work / f"latents-{plan.pictures}.pt"
    if path.exists():
        return Encoded(**torch.load(path))
    vae = load_vae(work).to(device)
    rng = np.random.default_rng(plan.pictures_seed)
    texts, latents, thumbnails = [], [], []
    for start in range(0, plan.pictures, 50):
        scenes = [sample_scene(rng) for _ in range(50)]
        texts += [caption(scene, rng) for scene in scenes]
        drawn = [draw(scene, start + i) for i, scene in enumerate(scenes)]
        images = as_tensor(np.stack(drawn)).to(device)
        with torch.autocast(device, torch.bfloat16):
            latents.append(vae.encode(images).latent_dist.mean.half().cpu())
        thumbnails.append(F.avg_pool2d(images, 8).half().cpu())
    first, second = tokenizers(work)
    parts = {
        "latents": torch.cat(latents),
        "thumbnails": torch.cat(thumbnails),
        "tokens": tokenize(first, texts),
        "tokens_2": tokenize(second, texts),
    }
    torch.save(parts, path)
    return Encoded(**parts)


class Painter(nn.Module):
    """The UNet and the text encoders that learn with it, wired as SDXL wires them."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = topology.new_unet()
        self.text_encoder = topology.new_text_encoder()
        self.text_encoder_2 = topology.new_text_encoder_2()

    def forward(
        self, noisy: Tensor, timestep: Tensor, tokens: Tensor, tokens_2: Tensor, kept: Tensor
    ) -> Tensor:
        """`kept` is 1 where the caption is heard, 0 where context and pooled are zeroed."""
        first = self.text_encoder(tokens, output_hidden_states=True)
        second = self.text_encoder_2(tokens_2, output_hidden_states=True)
        context = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        time_ids = torch.tensor([topology.TIME_IDS], dtype=torch.float32, device=noisy.device)
        added = {
            "text_embeds": second.text_embeds * kept[:, None],
            "time_ids": time_ids.repeat(len(noisy), 1),
        }
        predicted: Tensor = self.unet(
            noisy, timestep, context * kept[:, None, None], added_cond_kwargs=added
        ).sample
        return predicted


def train_unet(plan: Plan, work: Path, device: str) -> None:
    """Noise prediction on cached latents; the offset noise keeps backgrounds to the caption."""
    data = encode_pictures(plan, work, device)
    torch.manual_seed(0)
    painter = Painter().to(device)
    painter.unet.to(memory_format=torch.channels_last)
    alphas = topology.new_scheduler().alphas_cumprod.to(device)
    empty, empty_2 = (tokenize(t, [""]) for t in tokenizers(work))
    scale, batch = data.scale, plan.unet_batch

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        rows = torch.from_numpy(rng.integers(0, len(data.latents), batch))
        draws = torch.from_numpy(rng.random(batch))
        kept = (draws >= EMPTY_ZEROED).float().to(device)
        is_blank = ((draws >= EMPTY_ZEROED) & (draws < EMPTY_ZEROED + EMPTY_ENCODED))[:, None]
        tokens = torch.where(is_blank, empty, data.tokens[rows]).to(device)
        tokens_2 = torch.where(is_blank, empty_2, data.tokens_2[rows]).to(device)
        latents = data.latents[rows].float().to(device) * scale
        offset = torch.randn(batch, topology.LATENT_CHANNELS, 1, 1, device=device)
        noise = torch.randn_like(latents) + OFFSET_NOISE * offset
        timestep = torch.randint(0, len(alphas), (batch,), device=device)
        alpha = alphas[timestep].view(-1, 1, 1, 1)
        noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * noise
        noisy = noisy.contiguous(memory_format=torch.channels_last)
        predicted = painter(noisy, timestep, tokens, tokens_2, kept)
        return F.mse_loss(predicted, noise)

    fit(painter, loss_of, plan.unet, work / "unet.pt")


def fit_preview(data: Encoded) -> dict[str, object]:
    """The least-squares map from the UNet's four channels to colours: a picture without a VAE."""
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


def export_all(plan: Plan, work: Path, out: Path, device: str) -> None:
    """Write whatever is trained so far; what is not yet is written as it was born."""
    vae, painter, scorer = load_vae(work), Painter(), topology.new_scorer()
    load_fitted(painter, work / "unet.pt")
    load_fitted(scorer, work / "scorer.pt")
    data = encode_pictures(plan, work, device)
    vae.register_to_config(scaling_factor=round(data.scale, 6))
    trained = Trained(
        vae, painter.unet, painter.text_encoder, painter.text_encoder_2, scorer, fit_preview(data)
    )
    export(trained, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m sdxl.mini.train")
    parser.add_argument("--out", type=Path, required=True, help="the diffusers folder to write")
    parser.add_argument("--work", type=Path, help="checkpoints (default: OUT.work)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    args = parser.parse_args()
    plan, work = Plan(), args.work or args.out.with_name(args.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    stages: dict[str, Callable[[], None]] = {
        "vae": lambda: train_vae(plan, work, args.device),
        "unet": lambda: train_unet(plan, work, args.device),
        "scorer": lambda: train_scorer(plan.scorer, plan.scorer_groups, work, args.device),
        "export": lambda: export_all(plan, work, args.out, args.device),
    }
    for stage in args.stages:
        stages[stage]()


if __name__ == "__main__":
    main()
