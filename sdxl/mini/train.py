"""Trains the embedded model from nothing: `python -m sdxl.mini.train --out DIR`.

Stages, in order: the VAE, the UNet with both text encoders, the scorer, the VAE's decoder once
more, then the export of a diffusers folder. Each stage resumes from its checkpoint in `--work`,
so naming a stage again costs nothing once it is done. Everything is drawn; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTokenizer

from sdxl.mini import topology
from sdxl.mini.clip import Student, train_scorer
from sdxl.mini.export import Trained, export
from sdxl.mini.fitting import Schedule, fit, load_fitted, load_latest, save_finished
from sdxl.mini.scenes import SIDE, Scene, caption, draw, sample_group, sample_scene
from sdxl.mini.vocabulary import EOS, write_tokenizer

CROP = 64
EMPTY_ZEROED, EMPTY_ENCODED = 0.10, 0.02  # SDXL's own way to say nothing, and the plain way
OFFSET_NOISE = 0.25
SKETCH_SHARE = 0.1  # of the sketch's error in the loss
GROUP = 4
STAGES = ("vae", "unet", "contrast", "scorer", "decoder", "export")


_VAE = Schedule(steps=2600, peak_rate=2e-3, seed=1)
_DECODER = Schedule(steps=500, peak_rate=1e-3, seed=5)
_UNET = Schedule(steps=5551, peak_rate=1e-3, seed=2, cycle=8000)
_SCORER = Schedule(steps=1500, peak_rate=2e-3, seed=3)


@dataclass(frozen=True)
class Contrast:
    """A cycle of training on groups of scenes that differ in one attribute."""

    name: str
    schedule: Schedule
    place_share: float
    lowest: int  # timestep
    groups: int = 3_500
    seed: int = 7
    is_blind: bool = False


_CONTRASTS = (
    Contrast("groups", Schedule(steps=2000, peak_rate=8e-4, seed=6), 0.5, 400),
    Contrast("places", Schedule(steps=3600, peak_rate=1e-3, seed=8), 1.0, 900, 3_500, 9, True),
)


@dataclass(frozen=True)
class Plan:
    """The lengths and seeds of a whole run."""

    vae: Schedule = _VAE
    decoder: Schedule = _DECODER
    unet: Schedule = _UNET
    contrasts: tuple[Contrast, ...] = _CONTRASTS
    scorer: Schedule = _SCORER
    pictures: int = 20_000
    pictures_seed: int = 4
    vae_batch: int = 16  # crops; a whole picture takes the place of four
    vae_whole_from: int = 1600
    decoder_batch: int = 6
    unet_batch: int = 32
    unet_emphasis: tuple[tuple[int, float], ...] = ((0, 1), (2000, 12), (3350, 60))
    scorer_groups: int = 16


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
    """As far as it is trained; its encoder comes frozen, for latents must not drift."""
    vae = topology.new_vae()
    load_fitted(vae, work / "vae.pt")
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    load_fitted(vae, work / "decoder.pt")
    return vae


def train_decoder(plan: Plan, work: Path, device: str) -> None:
    """Sharpen what the decoder makes of latents that are not quite an encoder's."""
    torch.manual_seed(0)
    vae = load_vae(work).to(device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        images = as_tensor(_crops(rng, plan.decoder_batch, SIDE)).to(device)
        with torch.autocast(device, torch.bfloat16):
            with torch.no_grad():
                latents = vae.encode(images).latent_dist.mean
            blur = 0.2 * torch.rand(len(latents), 1, 1, 1, device=device)
            decoded = vae.decode(latents + blur * torch.randn_like(latents)).sample
        error = decoded.float() - images
        return error.abs().mean() + error.square().mean()

    fit(vae, loss_of, plan.decoder, work / "decoder.pt")


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


def encode_pictures(plan: Plan, work: Path, device: str) -> Encoded:
    """Draw and encode the UNet's pictures once; its steps then cost nothing but the UNet."""
    rng = np.random.default_rng(plan.pictures_seed)
    scenes = [(sample_scene(rng), i) for i in range(plan.pictures)]
    return _encode(scenes, rng, work / f"latents-{plan.pictures}.pt", work, device)


def encode_groups(contrast: Contrast, work: Path, device: str) -> Encoded:
    """Scenes of a group share their drawing's seed, so that they differ in one attribute only."""
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
        with torch.autocast(device, torch.bfloat16):
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


class Sketch(nn.Module):
    """Reads a rough thumbnail off a caption's context; only the training has it.

    SDXL's text encoders knew language before its UNet learned to paint. These ones learn beside
    it, and from the noise's error alone they took very long to say which colour goes where.
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
        heard = self.norm(context)
        places = self.places.expand(len(context), -1, -1)
        read, _ = self.read(places, heard, heard, need_weights=False)
        colours: Tensor = self.colour(places + read)
        return colours.movedim(1, 2).unflatten(2, (self.SIDE, self.SIDE))


class Painter(nn.Module):
    """The UNet and the text encoders that learn with it, wired as SDXL wires them."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = topology.new_unet()
        self.text_encoder = topology.new_text_encoder()
        self.text_encoder_2 = topology.new_text_encoder_2()
        self.sketch = Sketch()

    def forward(
        self, noisy: Tensor, timestep: Tensor, tokens: Tensor, tokens_2: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The noise and a sketch. `kept` is 1 where the caption is heard, 0 where context and
        pooled are zeroed."""
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
        return predicted, self.sketch(context)


def noise_weights(alphas: Tensor, limit: float) -> Tensor:
    """Weigh the noise's error as the velocity's, up to a limit; 1 leaves it plain.

    Places are decided under much noise, where the plain error hardly sees the picture.
    """
    weights = (1 / alphas).clamp(max=limit)
    return weights / weights.mean()


class Lesson:
    """The noise prediction loss on cached latents, captions dropped now and then."""

    def __init__(self, painter: Painter, plan: Plan, work: Path, device: str) -> None:
        self.painter, self.device = painter, device
        self.alphas = topology.new_scheduler().alphas_cumprod.to(device)
        self.scale = encode_pictures(plan, work, device).scale
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
        """Rows of one group share timestep and noise; the offset keeps backgrounds to captions.

        Blind rows see noise alone, as the first step of a sampler does, and are asked for the
        noise that would leave their picture: whatever they know of it, the caption said.
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


def train_unet(plan: Plan, work: Path, device: str) -> None:
    """On single pictures, with more and more weight on the much noised ones."""
    torch.manual_seed(0)
    painter = Painter().to(device)
    data, lesson = encode_pictures(plan, work, device), Lesson(painter, plan, work, device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        rows = torch.from_numpy(rng.integers(0, len(data.latents), plan.unet_batch))
        limit = [limit for first, limit in plan.unet_emphasis if first <= step][-1]
        return lesson.loss(data, rows, 1, 0, limit, rng)

    fit(painter, loss_of, plan.unet, work / "unet.pt")


def train_contrasts(plan: Plan, work: Path, device: str) -> None:
    """One cycle after the other, each from where the one before stood, not from its average."""
    before = "unet"
    for contrast in plan.contrasts:
        painter = Painter()
        load_latest(painter, work / f"{before}.pt")
        _train_contrast(contrast, painter.to(device), plan, work, device)
        before = contrast.name


def _train_contrast(
    contrast: Contrast, painter: Painter, plan: Plan, work: Path, device: str
) -> None:
    """Every other step on groups that share seed, noise and timestep and differ in one attribute.

    What they share cancels in the gradient of what tells them apart: so "top" and "bottom",
    which single pictures leave alike for very long, part within some hundred steps.
    """
    data, lesson = encode_pictures(plan, work, device), Lesson(painter, plan, work, device)
    groups = encode_groups(contrast, work, device)

    def loss_of(rng: np.random.Generator, step: int) -> Tensor:
        if step % 2 == 1:
            rows = torch.from_numpy(rng.integers(0, len(data.latents), plan.unet_batch))
            return lesson.loss(data, rows, 1, 0, 12, rng)
        if contrast.is_blind and step % 4 == 2:
            rows = torch.from_numpy(rng.integers(0, len(data.latents), plan.unet_batch))
            return lesson.loss(data, rows, 1, contrast.lowest, 60, rng, is_blind=True)
        heads = GROUP * rng.integers(0, contrast.groups, plan.unet_batch // GROUP)
        rows = torch.from_numpy((heads[:, None] + np.arange(GROUP)).ravel())
        return lesson.loss(
            groups, rows, GROUP, contrast.lowest, 60, rng, is_blind=contrast.is_blind
        )

    fit(painter, loss_of, contrast.schedule, work / f"{contrast.name}.pt")


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
    vae, painter, student = load_vae(work), Painter(), Student()
    for name in ("unet", *(contrast.name for contrast in plan.contrasts)):
        load_fitted(painter, work / f"{name}.pt")
    load_fitted(student, work / "scorer.pt")
    data = encode_pictures(plan, work, device)
    vae.register_to_config(scaling_factor=round(data.scale, 6))
    trained = Trained(
        vae,
        painter.unet,
        painter.text_encoder,
        painter.text_encoder_2,
        student.clip,
        fit_preview(data),
    )
    export(trained, out)


def adopt(weights: Path, plan: Plan, work: Path) -> None:
    """Take an exported folder for the end of the stages before "places", to go on from there."""
    vae = AutoencoderKL.from_pretrained(weights / "vae")
    painter = Painter()
    painter.unet.load_state_dict(load_file(weights / "unet/diffusion_pytorch_model.safetensors"))
    for name in ("text_encoder", "text_encoder_2"):
        encoder = getattr(painter, name)
        setattr(painter, name, type(encoder).from_pretrained(weights / name))
    save_finished(vae, plan.vae, work / "vae.pt")
    save_finished(painter, plan.unet, work / "unet.pt")
    save_finished(painter, plan.contrasts[0].schedule, work / f"{plan.contrasts[0].name}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m sdxl.mini.train")
    parser.add_argument("--out", type=Path, required=True, help="the diffusers folder to write")
    parser.add_argument("--work", type=Path, help="checkpoints (default: OUT.work)")
    parser.add_argument("--start", type=Path, help="go on from this exported folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    args = parser.parse_args()
    plan, work = Plan(), args.work or args.out.with_name(args.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    if args.start:
        adopt(args.start, plan, work)
    stages: dict[str, Callable[[], None]] = {
        "vae": lambda: train_vae(plan, work, args.device),
        "unet": lambda: train_unet(plan, work, args.device),
        "contrast": lambda: train_contrasts(plan, work, args.device),
        "decoder": lambda: train_decoder(plan, work, args.device),
        "scorer": lambda: train_scorer(plan.scorer, plan.scorer_groups, work, args.device),
        "export": lambda: export_all(plan, work, args.out, args.device),
    }
    for stage in args.stages:
        stages[stage]()


if __name__ == "__main__":
    main()
