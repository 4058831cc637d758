"""Trains an image adapter (IP-Adapter Plus, arXiv 2308.06721): CLIP's encoder, a resampler, and
keys and values for the UNet's cross-attentions. The UNet is not trained.

First CLIP's encoder learns to predict the scorer's ResNet maps from its patches: from captions
alone it had not learned shapes in 1000 steps. Next the resampler's tokens learn to equal the text
encoders' encoding of the picture's caption. Then keys and values are trained, so that the UNet with
the tokens and an empty prompt predicts the same noise as with the caption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterPlusImageProjection
from PIL import Image as PillowImage
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

from engines.image_weights import ATTENTIONS, HEAD_WIDTH, JOINED, PROJECTION, RESAMPLER_NAMES, SPLIT
from sdxl.catalogue import ENCODER
from sdxl.files import grant_usual
from sdxl.image_inputs import CLIP_DEVIATION, CLIP_MEAN
from sdxl.mini.clip import Scorer, pixels_of
from sdxl.mini.scenes import SHAPES, Image, Scene, caption, draw, sample_scene
from training.fitting import fit
from training.mini import topology
from training.mini.check import load_painter
from training.mini.conditioning import encode_captions
from training.mini.plan import TrainingPlan
from training.mini.scorer import UNKNOWN
from training.mini.styles import LIMIT, encode_images
from training.mini.unet_training import add_noise, noise_weights

NAME = "reference"
TOKENS = 16  # as many as the longest caption has
SIDE, PATCH = 64, 8  # the encoder's picture and patches, which match the scorer's third maps
WIDTH, HEADS, LAYERS = 96, 3, 4  # the resampler reads the last layer but one
RESAMPLER_WIDTH, RESAMPLER_LAYERS = 128, 4  # the number of layers that diffusers expects
WITHOUT_PICTURE = 0.12  # share of rows without a picture, as negative rows
OTHERS = 0.3  # share of the scenes of several things that is used
SEEDS = 2**31
AT_ONCE = 40


def train_image_adapter(
    plan: TrainingPlan, weights: Path, out: Path, work: Path, device: str
) -> None:
    torch.manual_seed(0)
    pipe = load_painter(weights).to(device)
    # Loaded separately, because the adapter changes the UNet.
    teacher = load_painter(weights).to(device).unet.requires_grad_(False)
    adapter = Adapter(pipe.unet).to(device)
    lesson = AdapterLesson(pipe, teacher, adapter, plan)
    lesson.see_scenes(work)
    fit(adapter, lesson.loss_of_sight, plan.image_sight, work / f"{NAME}-sight.pt")
    # Frozen, because it would forget shapes: most captions differ only by a colour.
    adapter.vision.requires_grad_(False)
    fit(adapter, lesson.loss_of_tokens, plan.image_tokens, work / f"{NAME}-tokens.pt")
    adapter.begin_from_text(pipe.unet)
    lesson.encode_scenes()
    fit(adapter, lesson.loss_of_noise, plan.image_adapter, work / f"{NAME}.pt")
    write_image_adapter(adapter, out)


class Adapter(nn.Module):
    """CLIP's encoder and the adapter. Its keys and values are layers of the UNet's processors."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        context = 2 * topology.TEXT_WIDTH
        self.vision = new_vision()
        self.projection = IPAdapterPlusImageProjection(
            embed_dims=WIDTH,
            output_dims=context,
            hidden_dims=RESAMPLER_WIDTH,
            depth=RESAMPLER_LAYERS,
            heads=RESAMPLER_WIDTH // HEAD_WIDTH,
            dim_head=HEAD_WIDTH,
            num_queries=TOKENS,
        )
        self.caption = nn.Linear(context, context, bias=False)
        """from tokens to the text encoders' encoding of the caption; only for training"""
        maps = topology.SCORER_WIDTH
        self.sight = nn.ModuleList(nn.Linear(WIDTH, size) for size in (2 * maps, maps, len(SHAPES)))
        """from patches to the scorer's maps, and from their mean to the scorer's features and to
        the shape; only for training"""
        processors = add_processors(unet, context)
        self.keys = nn.ModuleList(each.to_k_ip[0] for each in processors)
        self.values = nn.ModuleList(each.to_v_ip[0] for each in processors)
        """layers of the UNet's processors, in a file's order"""

    def seen(self, pixels: Tensor) -> Tensor:
        """Return the resampler's input: a class embedding and the patches."""
        states: Tensor = self.vision(pixels, output_hidden_states=True).hidden_states[-2]
        return states

    def tokens(self, pixels: Tensor) -> Tensor:
        tokens: Tensor = self.projection(self.seen(pixels))
        return tokens

    @torch.no_grad()
    def begin_from_text(self, unet: Any) -> None:
        """Initialise keys and values so that tokens are read like a caption."""
        layers = dict(unet.named_modules())
        crossing = [layers[name.removesuffix(".processor")] for name in crossing_names(unet)]
        for image_layers, name in ((self.keys, "to_k"), (self.values, "to_v")):
            for weight, layer in zip(image_layers.parameters(), crossing, strict=True):
                weight.copy_(getattr(layer, name).weight @ self.caption.weight)


def new_vision() -> CLIPVisionModelWithProjection:
    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        projection_dim=topology.TEXT_WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=SIDE,
        patch_size=PATCH,
    )
    vision = CLIPVisionModelWithProjection(config)
    begin_seeing(vision.vision_model)
    return vision


@torch.no_grad()
def begin_seeing(vision: Any) -> None:
    """Initialise a small transformer so that few steps train it: patches have position embeddings,
    and attend to similar and near patches (mimetic initialisation, arXiv 2305.09828)."""
    embeddings = vision.embeddings
    embeddings.position_embedding.weight[1:] = 0.5 * waves(SIDE // PATCH, WIDTH)
    nn.init.normal_(embeddings.patch_embedding.weight, std=(3 * PATCH**2) ** -0.5)
    for layer in vision.encoder.layers:
        attention, size = layer.self_attn, WIDTH // HEADS
        for rows in torch.arange(WIDTH).split(size):
            left, sizes, right = torch.linalg.svd(near_identity(0.7, 0.7))
            sizes = sizes[:size, None].sqrt()
            attention.q_proj.weight[rows] = left[:, :size].T * sizes
            attention.k_proj.weight[rows] = right[:size] * sizes
        left, sizes, right = torch.linalg.svd(near_identity(0.4, -0.4))
        attention.v_proj.weight.copy_(right * sizes.sqrt()[:, None])
        attention.out_proj.weight.copy_(left * sizes.sqrt())
        for linear in (layer.mlp.fc1, layer.mlp.fc2):
            nn.init.xavier_uniform_(linear.weight)


def near_identity(noise: float, identity: float) -> Tensor:
    return noise * torch.randn(WIDTH, WIDTH) / WIDTH**0.5 + identity * torch.eye(WIDTH)


def waves(count: int, width: int) -> Tensor:
    """Return the places of count × count patches as sines and cosines of x and y."""
    y, x = torch.meshgrid(*[torch.arange(count, dtype=torch.float32)] * 2, indexing="ij")
    rates = 100 ** (-torch.arange(width // 4) * 4 / width)
    angles = [each.flatten()[:, None] * rates for each in (x, y)]
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], 1)


def crossing_names(unet: Any) -> list[str]:
    """Return the names of the cross-attentions' processors."""
    return [name for name in unet.attn_processors if name.endswith("attn2.processor")]


def add_processors(unet: Any, context: int) -> list[Any]:
    """Give each cross-attention a processor with keys and values for tokens; return these."""
    layers, crossing = dict(unet.named_modules()), crossing_names(unet)
    processors: dict[str, Any] = {name: AttnProcessor2_0() for name in unet.attn_processors}
    for name in crossing:
        width = layers[name.removesuffix(".processor")].to_k.out_features
        processors[name] = IPAdapterAttnProcessor2_0(width, context, (TOKENS,))
    unet.requires_grad_(False)
    unet.set_attn_processor(dict(processors))
    return [processors[name] for name in crossing]


class AdapterLesson:
    """The losses of the three stages, on drawn scenes and their captions."""

    def __init__(self, pipe: Any, teacher: Any, adapter: Adapter, plan: TrainingPlan) -> None:
        self._pipe, self._teacher, self._adapter, self._plan = pipe, teacher, adapter, plan
        self._device = pipe.device
        self._alphas = topology.new_scheduler().alphas_cumprod.to(self._device)
        self._scorer = Scorer().model.vision.to(self._device).requires_grad_(False)

    @torch.no_grad()
    def see_scenes(self, work: Path) -> None:
        """Draw scenes; store the scorer's maps and features of them."""
        path = work / f"{NAME}-seen.pt"
        if not path.exists():
            parts, rng = [], np.random.default_rng(29)
            for _ in range(self._plan.image_seen // AT_ONCE):
                scenes = [sample_reference(rng) for _ in range(AT_ONCE)]
                pictures = [draw(scene, int(rng.integers(SEEDS))) for scene in scenes]
                parts.append([shrunk(pictures), *self._scored(pictures), shapes_of(scenes)])
            torch.save([torch.cat(each) for each in zip(*parts, strict=True)], path)
        self._pixels, self._maps, self._features, self._shapes = torch.load(path)

    def _scored(self, pictures: list[Image]) -> tuple[Tensor, Tensor]:
        """Return the scorer's last maps, one place for each patch, and its features."""
        pixels = pixels_of(np.stack(pictures)).to(self._device)
        outputs = self._scorer(pixels, output_hidden_states=True)
        fine, coarse = outputs.hidden_states[-2:]
        maps = torch.cat([fine, F.interpolate(coarse, fine.shape[2:])], 1)
        return _normed(maps, (0, 2, 3)).half().cpu(), _normed(outputs.logits, (1,)).half().cpu()

    def loss_of_sight(self, rng: np.random.Generator, step: int) -> Tensor:
        rows = torch.from_numpy(rng.integers(0, len(self._pixels), self._plan.image_sight_batch))
        seen = self._adapter.seen(pixels_of_shrunk(self._pixels[rows]).to(self._device))[:, 1:]
        maps, features, shapes = (
            each[rows].to(self._device) for each in (self._maps, self._features, self._shapes)
        )
        to_maps, to_features, to_shape = self._adapter.sight
        error = F.mse_loss(to_maps(seen), maps.flatten(2).mT.float())
        error = error + F.mse_loss(to_features(seen.mean(1)), features.float())
        return error + F.cross_entropy(to_shape(seen.mean(1)), shapes, ignore_index=UNKNOWN)

    def loss_of_tokens(self, rng: np.random.Generator, step: int) -> Tensor:
        scenes = [sample_reference(rng) for _ in range(self._plan.image_batch)]
        pixels, is_shown = self._shown(scenes, rng)
        wanted = self._contexts(scenes)[:, :TOKENS] * is_shown[:, None, None]
        predicted = self._adapter.caption(self._adapter.tokens(pixels))
        error: Tensor = (predicted - wanted).square().mean() / wanted.square().mean()
        return error

    @torch.no_grad()
    def encode_scenes(self) -> None:
        """Draw scenes and encode them."""
        rng = np.random.default_rng(28)
        self._scenes = [sample_reference(rng) for _ in range(self._plan.image_scenes)]
        pictures = [draw(scene, int(rng.integers(SEEDS))) for scene in self._scenes]
        self._latents = encode_images(self._pipe, pictures)
        self._empty = encode_captions(self._pipe, [""])

    def loss_of_noise(self, rng: np.random.Generator, step: int) -> Tensor:
        rows = rng.integers(0, len(self._scenes), self._plan.image_unet_batch)
        scenes = [self._scenes[row] for row in rows]
        pixels, is_shown = self._shown(scenes, rng)
        clean = self._latents[torch.from_numpy(rows)].to(self._device)
        noisy, timestep, _ = add_noise(clean, self._alphas)
        empty_rows = torch.zeros(len(rows), dtype=torch.long)
        conditions = self._empty.of(empty_rows, str(self._device), is_shown.cpu())
        context = self._contexts(scenes) * is_shown[:, None, None]
        with torch.no_grad():
            wanted = self._teacher(
                noisy, timestep, **{**conditions, "encoder_hidden_states": context}
            ).sample
        text = (conditions["encoder_hidden_states"], [self._adapter.tokens(pixels)[:, None]])
        predicted = self._pipe.unet(
            noisy, timestep, **{**conditions, "encoder_hidden_states": text}
        ).sample
        error = (predicted - wanted).square().mean((1, 2, 3))
        return (error * noise_weights(self._alphas, LIMIT)[timestep]).mean()

    def _shown(self, scenes: list[Scene], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return the scenes' pixels, and for each row 1 if they are shown. Negative rows have 0,
        and zeros as pixels."""
        pictures = [draw(scene, int(rng.integers(SEEDS))) for scene in scenes]
        is_shown = torch.from_numpy(rng.random(len(scenes)) >= WITHOUT_PICTURE).float()
        pixels = pixels_of_shrunk(shrunk(pictures)) * is_shown[:, None, None, None]
        return pixels.to(self._device), is_shown.to(self._device)

    @torch.no_grad()
    def _contexts(self, scenes: list[Scene]) -> Tensor:
        """Return the text encoders' context of the scenes' captions."""
        encoded = encode_captions(self._pipe, [caption(scene) for scene in scenes])
        return encoded.context.float().to(self._device)


def _normed(values: Tensor, over: tuple[int, ...]) -> Tensor:
    deviation, mean = torch.std_mean(values, over, keepdim=True)
    return (values - mean) / (deviation + 1e-3)


def sample_reference(rng: np.random.Generator) -> Scene:
    """Return a scene whose caption states all facts. Most scenes have one thing."""
    while True:
        scene = sample_scene(rng)
        if scene.is_full and (scene.kind == "single" or rng.random() < OTHERS):
            return scene


def shapes_of(scenes: list[Scene]) -> Tensor:
    """Return the number of each picture's shape; UNKNOWN if it has several."""
    return torch.tensor(
        [
            UNKNOWN if scene.kind == "pair" else SHAPES.index(scene.things[0].shape)
            for scene in scenes
        ]
    )


def shrunk(pictures: list[Image]) -> Tensor:
    """Return the pictures in the encoder's size, uint8 NHWC."""
    bicubic = PillowImage.Resampling.BICUBIC
    sized = [PillowImage.fromarray(each).resize((SIDE, SIDE), bicubic) for each in pictures]
    return torch.from_numpy(np.stack([np.asarray(each) for each in sized]))


def pixels_of_shrunk(pictures: Tensor) -> Tensor:
    """Return the input of CLIP's encoder."""
    normed = (pictures / 255 - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_DEVIATION)
    return normed.movedim(-1, 1).contiguous()


def write_image_adapter(adapter: Adapter, folder: Path) -> None:
    """Write the adapter and its encoder in h94/IP-Adapter's layout, in half precision."""
    tensors = {
        PROJECTION + name: tensor for name, tensor in in_file(adapter.projection.state_dict())
    }
    for letter, layers in (("k", adapter.keys), ("v", adapter.values)):
        for number, weight in enumerate(layers.parameters()):
            # Even numbers are self-attentions.
            tensors[f"{ATTENTIONS}{2 * number + 1}.to_{letter}_ip.weight"] = weight
    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: tensor.detach().half().contiguous() for name, tensor in tensors.items()}
    save_file(halves, folder / f"{NAME}.safetensors")
    adapter.vision.half().save_pretrained(folder / ENCODER)
    adapter.vision.float()
    for path in (folder / f"{NAME}.safetensors", *(folder / ENCODER).iterdir()):
        grant_usual(path)


def in_file(state: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return the resampler's tensors with their names in files."""
    names = {diffusers_name: ".".join(place) for place, diffusers_name in RESAMPLER_NAMES.items()}
    tensors = []
    for name, tensor in state.items():
        head, *rest = name.split(".", 2)
        if head != "layers":
            tensors.append((name, tensor))
            continue
        number, inner = rest
        layer, _, kind = inner.rpartition(".")
        if layer == SPLIT[0]:
            values = state[name.replace(*SPLIT)]
            tensors.append((f"layers.{number}.{JOINED}.{kind}", torch.cat([tensor, values])))
        elif layer != SPLIT[1]:
            tensors.append((f"layers.{number}.{names[layer]}.{kind}", tensor))
    return tensors
