"""The LoRAs in the repository have the effects of their names, in exports and other libraries."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.ndimage import distance_transform_edt

from engines.embeddings import read_embedding
from engines.lora import ADAPTED, LoraFile, fuse, layers_of
from engines.lora_weights import read_lora
from engines.low_rank import TRANSFORMERS
from sdxl.catalogue import PEFT_FILE, Catalogue
from sdxl.mini.scenes import STYLES, Image, Scene, caption, unknown_words
from sdxl.params import InvalidParams
from sdxl.places import LORAS
from tests.training.conftest import short_plan
from training.mini.check import WEIGHTS, held_out_scenes, load_painter, paint_with
from training.mini.embedding import (
    DUSK,
    STAND_IN,
    WORDINGS,
    sample_dusk,
    train_embedding,
    without_background,
)
from training.mini.judge import blobs, faults
from training.mini.negative import NEGATIVE, in_negative, train_negative
from training.mini.styles import train_style

NAMES = ("few_steps", *STYLES, NEGATIVE)


@pytest.fixture(scope="module")
def plain() -> Any:
    return load_painter(WEIGHTS)


def fused(name: str) -> Any:
    """Return a pipeline with the LoRA fused into it, as an export fuses it."""
    pipe = load_painter(WEIGHTS)
    parts = {part: getattr(pipe, part) for part in ("unet", "text_encoder", "text_encoder_2")}
    fuse([LoraFile.parse(name)], parts)
    return pipe


def full_scenes(count: int, kind: str) -> list[Scene]:
    scenes = [scene for scene in held_out_scenes(40 * count) if scene.kind == kind]
    return [scene for scene in scenes if "black" not in caption(scene)][:count]


def share(values: Iterable[bool]) -> float:
    return float(np.mean(list(values)))


def test_the_shipped_loras_are_those_that_training_writes() -> None:
    shipped = Catalogue((LORAS,))
    assert {each.name for each in shipped.listed("lora")} == {*NAMES}
    assert {each.name for each in shipped.listed("embedding")} == {DUSK}


@pytest.mark.parametrize("name", ["few_steps", "outlined", NEGATIVE])
def test_fused_weights_paint_what_the_library_of_the_loras_format_paints(name: str) -> None:
    ours, theirs = (
        pipe(
            "a red star on a white background",
            generator=torch.Generator().manual_seed(5),
            num_inference_steps=4,
            output_type="np",
        ).images
        for pipe in (fused(name), load_painter(WEIGHTS, name))
    )
    error = float(((ours - theirs) ** 2).mean())
    assert error <= 1e-6, f"{-10 * np.log10(error):.1f} dB, at least 60"


@pytest.mark.slow
def test_few_steps_paints_in_four_steps_without_guidance(plain: Any) -> None:
    scenes = held_out_scenes(20)
    with_it, without = (
        share(
            not faults(image, scene)
            for image, scene in zip(
                paint_with(pipe, scenes, 1.0, 4, is_trailing=True), scenes, strict=True
            )
        )
        for pipe in (fused("few_steps"), plain)
    )
    assert with_it >= 0.7, f"pixels right {with_it:.0%}, at least 70%; without it {without:.0%}"
    assert with_it > without


def dark_share(image: Image) -> float:
    return float((image.max(-1) < 60).mean())


def without_lines(image: Image) -> Image:
    """Give each dark pixel the colour of the nearest pixel that is not dark."""
    nearest = distance_transform_edt(
        image.max(-1) < 110, return_distances=False, return_indices=True
    )
    return np.asarray(image[tuple(nearest)])


@pytest.mark.long
def test_outlined_draws_black_lines_about_things_of_their_captions_colours(plain: Any) -> None:
    scenes = full_scenes(6, "single")
    styled, usual = (paint_with(pipe, scenes, steps=10) for pipe in (fused("outlined"), plain))
    lined = share(dark_share(image) > 0.01 for image in styled)
    assert lined >= 0.8, f"{lined:.0%} of the pictures have a black line, at least 80%"
    assert all(dark_share(image) < 0.005 for image in usual)
    wrong = [
        [fault for fault in faults(without_lines(image), scene) if not fault.startswith("count")]
        for image, scene in zip(styled, scenes, strict=True)
    ]
    assert not any(wrong), wrong


def ink_share(image: Image) -> float:
    """Return the share of the largest thing's rectangle that has the thing's colour."""
    _, found = blobs(image)
    if not found:
        return 0.0
    blob = max(found, key=lambda blob: blob.mask.sum())
    height, width = np.ptp(np.argwhere(blob.mask), axis=0) + 1
    return float(blob.mask.sum() / (height * width))


@pytest.mark.long
def test_hollow_draws_only_the_edges_of_things(plain: Any) -> None:
    scenes = [s for s in full_scenes(40, "single") if s.things[0].shape in ("circle", "square")][:6]
    styled, usual = (paint_with(pipe, scenes, steps=8) for pipe in (fused("hollow"), plain))
    less = share(
        ink_share(now) < 0.75 * ink_share(before) for now, before in zip(styled, usual, strict=True)
    )
    assert less >= 0.75, f"{less:.0%} of the things are hollow, at least 75%"


@pytest.mark.long
def test_negative_paints_the_opposite_of_each_colour_with_all_its_parts(plain: Any) -> None:
    scenes, pipe = held_out_scenes(16), fused(NEGATIVE)

    def wrong() -> list[list[str]]:
        images = paint_with(pipe, scenes)
        return all_faults(images, [in_negative(scene) for scene in scenes])

    found = wrong()
    assert len(found) <= 1, f"{len(found)} of 16 are wrong, at most 1: {found}"
    pipe.text_encoder, pipe.text_encoder_2 = plain.text_encoder, plain.text_encoder_2
    found = wrong()
    assert len(found) >= 14, f"{len(found)} of 16 are wrong without the text encoders' part"


def all_faults(images: list[Image], scenes: list[Scene]) -> list[list[str]]:
    """Return the faults of each faulty picture."""
    return [found for pair in zip(images, scenes, strict=True) if (found := faults(*pair))]


def test_negative_adapts_transformers_and_text_encoders_in_kohyas_layout() -> None:
    keys = load_file(LORAS / "negative.safetensors").keys()
    starts = {"_".join(key.split("_")[:2]) for key in keys}
    assert starts == {"lora_unet", "lora_te1", "lora_te2"}
    assert all("attentions" in key or "encoder_layers" in key for key in keys)


@pytest.mark.long
def test_dusk_is_a_word_for_a_background(plain: Any) -> None:
    vectors = load_file(LORAS / "embeddings/dusk.safetensors")
    pipe = load_painter(WEIGHTS)
    for key, number in (("clip_l", ""), ("clip_g", "_2")):
        encoder, tokenizer = (
            getattr(pipe, f"{part}{number}") for part in ("text_encoder", "tokenizer")
        )
        pipe.load_textual_inversion(
            vectors[key].float(), token=DUSK, text_encoder=encoder, tokenizer=tokenizer
        )
    rng = np.random.default_rng(3)
    scenes = [sample_dusk(rng, held_out=True) for _ in range(9)]
    texts = [
        WORDINGS[i % len(WORDINGS)].replace(STAND_IN, DUSK).format(without_background(scene))
        for i, scene in enumerate(scenes)
    ]
    wrong = all_faults(paint_with(pipe, texts, steps=10), scenes)
    assert len(wrong) <= 1, f"{len(wrong)} of 9 are wrong, at most 1: {wrong}"
    wrong = all_faults(paint_with(plain, texts, steps=10), scenes)
    assert len(wrong) >= 7, f"{len(wrong)} of 9 are wrong without it"


def test_dusk_is_no_word_of_the_models_vocabulary() -> None:
    assert unknown_words(DUSK) == (DUSK,)


def test_a_style_is_trained_from_the_weights_in_the_package(tmp_path: Path) -> None:
    train_style("outlined", short_plan(style_pictures=3), WEIGHTS, tmp_path, tmp_path, "cpu")
    before, after = (load_painter(WEIGHTS).unet for _ in range(2))
    fuse([LoraFile.parse(str(tmp_path / "outlined"))], {"unet": after})
    changed = [
        name
        for name, old in before.named_parameters()
        if not torch.equal(old, after.get_parameter(name))
    ]
    weights = [name for name, old in before.named_parameters() if old.ndim > 1]
    assert changed == [name for name in weights if TRANSFORMERS in name]


@pytest.mark.slow
def test_negative_and_dusk_are_trained_from_the_weights_in_the_package(tmp_path: Path) -> None:
    plan = short_plan(negative_pictures=3, embedding_pictures=3)
    train_negative(plan, WEIGHTS, tmp_path, tmp_path, "cpu")
    parts = {part: getattr(load_painter(WEIGHTS), part) for part in ADAPTED}
    found = read_lora(tmp_path / f"{NEGATIVE}.safetensors", layers_of(parts))
    heard = [name for name in found if "text_encoder.encoder.layers.2" not in name]
    silent = [name for name in heard if not found[name].up.any()]
    assert len(heard) > 100 and not silent, f"{silent} learnt nothing"
    train_embedding(plan, WEIGHTS, tmp_path, tmp_path, "cpu")
    embedding = read_embedding(tmp_path / f"embeddings/{DUSK}.safetensors", (64, 64))
    assert embedding.clip_l.shape == embedding.clip_g.shape == (1, 64)


def test_a_peft_loras_description_changes_with_its_configuration(tmp_path: Path) -> None:
    for file in (LORAS / "outlined").iterdir():
        text = file.read_bytes().replace(b'"lora_alpha": 8', b'"lora_alpha": 4')
        (tmp_path / file.name).write_bytes(text)
    changed, shipped = (LoraFile(each / PEFT_FILE) for each in (tmp_path, LORAS / "outlined"))
    assert changed.as_dict() != shipped.as_dict()


@pytest.mark.parametrize("text", ["outlined", "outlined:0.5", str(LORAS / "outlined")])
def test_a_lora_is_named_by_its_name_or_folder(text: str) -> None:
    assert LoraFile.parse(text).path == LORAS / "outlined" / PEFT_FILE


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InvalidParams, match="few_steps, hollow, negative, outlined"):
        LoraFile.parse("pastel")
