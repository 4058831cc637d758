"""The weights in the repository: small, loaded by plain libraries, with right pictures."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline
from safetensors import safe_open
from torch.nn import functional as F
from transformers import CLIPTextModelWithProjection, ResNetForImageClassification

from sdxl.mini.clip import Scorer
from sdxl.mini.scenes import SIDE, draw
from training.mini.check import (
    WEIGHTS,
    PictureVerdict,
    held_out_scenes,
    judge_all,
    load_painter,
    paint_with,
)

MIB = 2**20


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer()


def _share(verdicts: list[PictureVerdict], is_good: Callable[[PictureVerdict], bool]) -> float:
    return float(np.mean([is_good(verdict) for verdict in verdicts]))


def test_the_folder_stays_within_16_mib() -> None:
    size = sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file())
    assert size <= 16 * MIB, f"{size / MIB:.2f} MiB, at most 16"


@pytest.mark.parametrize(
    ("path", "dtype"),
    [
        ("unet/diffusion_pytorch_model.safetensors", "F16"),
        ("vae/diffusion_pytorch_model.safetensors", "F16"),
        ("text_encoder/model.safetensors", "F32"),
        ("text_encoder_2/model.safetensors", "F32"),
    ],
)
def test_each_network_is_stored_in_its_dtype_and_finite(path: str, dtype: str) -> None:
    with safe_open(WEIGHTS / path, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a dict)
            if tensors.get_slice(name).get_dtype() != "I64":
                assert tensors.get_slice(name).get_dtype() == dtype, name
                assert torch.isfinite(tensors.get_tensor(name)).all(), name


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2"])
def test_text_encoders_are_named_as_in_sdxl(name: str) -> None:
    with safe_open(WEIGHTS / name / "model.safetensors", "pt") as tensors:
        strange = [
            key
            for key in tensors.keys()  # noqa: SIM118
            if not key.startswith(("text_model.", "text_projection."))
        ]
    assert strange == []


def test_plain_diffusers_loads_the_folder_as_sdxl() -> None:
    pipe = StableDiffusionXLPipeline.from_pretrained(WEIGHTS, torch_dtype=torch.float32)
    assert pipe.unet.dtype == pipe.vae.dtype == pipe.text_encoder_2.dtype == torch.float32
    assert pipe.config.force_zeros_for_empty_prompt
    assert pipe.default_sample_size * pipe.vae_scale_factor == SIDE
    context, _, pooled, _ = pipe.encode_prompt("a red circle")
    assert context.shape == (1, 77, pipe.unet.config.cross_attention_dim)
    assert pooled.shape == (1, pipe.text_encoder_2.config.projection_dim)


def test_the_end_of_the_prompt_is_pooled_whatever_follows() -> None:
    """Padding differs between the tokenizers, and must not change the pooled vector."""
    pipe = StableDiffusionXLPipeline.from_pretrained(WEIGHTS, torch_dtype=torch.float32)
    encoder, ids = pipe.text_encoder_2, pipe.tokenizer_2("a red circle").input_ids
    padded = torch.tensor([ids + [0] * (77 - len(ids))])
    short, long = (encoder(x).text_embeds for x in (torch.tensor([ids]), padded))
    assert torch.allclose(short, long, atol=1e-5)


def test_plain_transformers_loads_the_scorer() -> None:
    towers = {"vision": ResNetForImageClassification, "text": CLIPTextModelWithProjection}
    for name, tower in towers.items():
        _, found = tower.from_pretrained(WEIGHTS / "clip" / name, output_loading_info=True)
        assert not found["missing_keys"] and not found["unexpected_keys"], f"{name}: {found}"


def test_the_preview_shows_the_latents_colours() -> None:
    vae = AutoencoderKL.from_pretrained(WEIGHTS / "vae").float()
    preview = json.loads((WEIGHTS / "preview.json").read_text())
    images = np.stack([draw(scene, i) for i, scene in enumerate(held_out_scenes(8))])
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        latents = vae.encode(pixels).latent_dist.mean * vae.config.scaling_factor
    factors = torch.tensor(preview["latent_rgb_factors"])
    shown = latents.movedim(1, -1) @ factors + torch.tensor(preview["latent_rgb_bias"])
    true = F.avg_pool2d(pixels, SIDE // latents.shape[-1]).movedim(1, -1)
    left = ((shown - true).square().sum() / (true - true.mean((0, 1, 2))).square().sum()).item()
    assert left < 0.3, f"the preview leaves {left:.0%} of the colours' variance, at most 30%"


def test_the_vae_gives_a_picture_back() -> None:
    pipe = StableDiffusionXLPipeline.from_pretrained(WEIGHTS, torch_dtype=torch.float32)
    images = np.stack([draw(scene, i) for i, scene in enumerate(held_out_scenes(8))])
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        decoded = pipe.vae.decode(pipe.vae.encode(pixels).latent_dist.mean).sample.clamp(-1, 1)
    error = ((decoded - pixels) / 2).square().mean().item()
    psnr = -10 * np.log10(error)
    assert psnr > 26, f"{psnr:.1f} dB, at least 26"


@pytest.mark.slow
def test_the_scorer_ranks_originals_first(scorer: Scorer) -> None:
    scenes = held_out_scenes(60, seed=99)
    drawn = [draw(scene, i) for i, scene in enumerate(scenes)]
    first = _share(judge_all(scenes, drawn, scorer), lambda v: v.is_first)
    assert first >= 0.95, f"{first:.1%} of originals rank first, at least 95%"


@pytest.mark.long
def test_generated_pictures_show_their_captions(scorer: Scorer) -> None:
    check_pictures(scorer, count=40)


@pytest.mark.long
def test_two_hundred_pictures_show_their_captions(scorer: Scorer) -> None:
    check_pictures(scorer, count=200)


def check_pictures(scorer: Scorer, count: int) -> None:
    scenes = held_out_scenes(count)
    verdicts = judge_all(scenes, paint_with(load_painter(), scenes), scorer)
    singles = [v for v in verdicts if v.scene.kind == "single"]
    first, first_of_singles = (_share(each, lambda v: v.is_first) for each in (verdicts, singles))
    right = _share(verdicts, lambda v: not v.fault)
    wrong = [v.fault for v in verdicts if v.fault]
    assert first >= 0.75, f"own caption first {first:.0%}, at least 75%"
    assert first_of_singles >= 0.9, f"of single things {first_of_singles:.0%}, at least 90%"
    assert right >= 0.9, f"pixels right {right:.0%}, at least 90%: {wrong}"
