"""The weights in the repository: small, loaded by plain libraries, with right pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import CLIPTextModelWithProjection, ResNetForImageClassification

from sdxl.mini.clip import Scorer
from sdxl.mini.scenes import SIDE, draw
from sdxl.places import CONTROLNETS, IP_ADAPTERS, LORAS, MINI_REFINER
from training.mini.autoencoder import as_tensor
from training.mini.check import (
    WEIGHTS,
    PictureVerdict,
    held_out_scenes,
    judge_all,
    load_painter,
    paint_with,
    pass_through_vae,
    psnr,
)

MIB = 2**20


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return Scorer()


def _share(verdicts: list[PictureVerdict], is_good: Callable[[PictureVerdict], bool]) -> float:
    return float(np.mean([is_good(verdict) for verdict in verdicts]))


@pytest.mark.parametrize(
    ("folder", "most_mib"),
    [(WEIGHTS, 16), (LORAS, 6), (CONTROLNETS, 8), (IP_ADAPTERS, 4), (MINI_REFINER, 10)],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_shipped_folders_are_small_finite_and_in_half_precision_except_text_encoders(
    folder: Path, most_mib: int
) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    assert size <= most_mib * MIB, f"{size / MIB:.2f} MiB, at most {most_mib}"
    networks = [path for path in files if path.suffix == ".safetensors"]
    assert networks
    for path in networks:
        is_encoder = path.parent.name.startswith("text_encoder")
        expected = torch.float32 if is_encoder else torch.float16
        for name, tensor in load_file(path).items():
            if tensor.is_floating_point():
                assert tensor.dtype == expected, f"{path}: {name}"
                assert torch.isfinite(tensor).all(), f"{path}: {name}"


def test_text_encoders_are_named_as_in_sdxl() -> None:
    for name in ("text_encoder", "text_encoder_2"):
        keys = load_file(WEIGHTS / name / "model.safetensors")
        assert all(key.startswith(("text_model.", "text_projection.")) for key in keys), [*keys]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return load_painter()


def test_plain_diffusers_loads_the_folder_as_sdxl(pipe: Any) -> None:
    assert pipe.unet.dtype == pipe.vae.dtype == pipe.text_encoder_2.dtype == torch.float32
    assert pipe.config.force_zeros_for_empty_prompt
    assert pipe.default_sample_size * pipe.vae_scale_factor == SIDE
    context, _, pooled, _ = pipe.encode_prompt("a red circle")
    assert context.shape == (1, 77, pipe.unet.config.cross_attention_dim)
    assert pooled.shape == (1, pipe.text_encoder_2.config.projection_dim)


def test_the_end_of_the_prompt_is_pooled_whatever_follows(pipe: Any) -> None:
    """Padding differs between the tokenizers, and must not change the pooled vector."""
    encoder, ids = pipe.text_encoder_2, pipe.tokenizer_2("a red circle").input_ids
    padded = torch.tensor([ids + [0] * (77 - len(ids))])
    short, long = (encoder(x).text_embeds for x in (torch.tensor([ids]), padded))
    assert torch.allclose(short, long, atol=1e-5)


def test_plain_transformers_loads_the_scorer() -> None:
    towers = {"vision": ResNetForImageClassification, "text": CLIPTextModelWithProjection}
    for name, tower in towers.items():
        _, found = tower.from_pretrained(WEIGHTS / "clip" / name, output_loading_info=True)
        assert not found["missing_keys"] and not found["unexpected_keys"], f"{name}: {found}"


def test_the_preview_shows_the_latents_colours(pipe: Any) -> None:
    vae = pipe.vae
    preview = json.loads((WEIGHTS / "preview.json").read_text())
    images = np.stack([draw(scene, i) for i, scene in enumerate(held_out_scenes(8))])
    pixels = as_tensor(images)
    with torch.no_grad():
        latents = vae.encode(pixels).latent_dist.mean * vae.config.scaling_factor
    factors = torch.tensor(preview["latent_rgb_factors"])
    shown = latents.movedim(1, -1) @ factors + torch.tensor(preview["latent_rgb_bias"])
    true = F.avg_pool2d(pixels, SIDE // latents.shape[-1]).movedim(1, -1)
    left = ((shown - true).square().sum() / (true - true.mean((0, 1, 2))).square().sum()).item()
    assert left < 0.3, f"the preview leaves {left:.0%} of the colours' variance, at most 30%"


def test_the_vae_gives_a_picture_back() -> None:
    drawn = [draw(scene, i) for i, scene in enumerate(held_out_scenes(8))]
    found = psnr(drawn, pass_through_vae(drawn))
    assert found > 26, f"{found:.1f} dB, at least 26"


@pytest.mark.slow
def test_the_scorer_ranks_originals_first(scorer: Scorer) -> None:
    scenes = held_out_scenes(60, seed=99)
    drawn = [draw(scene, i) for i, scene in enumerate(scenes)]
    first = _share(judge_all(scenes, drawn, scorer), lambda v: v.is_first)
    assert first >= 0.95, f"{first:.1%} of originals rank first, at least 95%"


@pytest.mark.long
def test_two_hundred_pictures_show_their_captions(scorer: Scorer) -> None:
    scenes = held_out_scenes(200)
    verdicts = judge_all(scenes, paint_with(load_painter(), scenes), scorer)
    singles = [v for v in verdicts if v.scene.kind == "single"]
    first, first_of_singles = (_share(each, lambda v: v.is_first) for each in (verdicts, singles))
    right = _share(verdicts, lambda v: not v.fault)
    wrong = [v.fault for v in verdicts if v.fault]
    assert first >= 0.75, f"own caption first {first:.0%}, at least 75%"
    assert first_of_singles >= 0.9, f"of single things {first_of_singles:.0%}, at least 90%"
    assert right >= 0.9, f"pixels right {right:.0%}, at least 90%: {wrong}"
