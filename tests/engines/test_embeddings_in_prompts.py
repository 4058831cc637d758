"""Embeddings (textual inversion) in prompts, against words of the model and diffusers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import save_file
from torch import Tensor

from engines import load
from engines.bank_shelf import BankShelf
from sdxl.attachments import Lora
from sdxl.catalogue import Catalogue
from sdxl.checkpoint import Checkpoint, find
from sdxl.params import GenerationParams, InvalidParams
from sdxl.pipeline import Pipeline
from sdxl.places import LORAS
from sdxl.specs import MOST_VECTORS
from tests.conftest import images_of, psnr
from tests.engines.test_loras import LEAST_DB
from tests.sdxl.their_schedulers import diffusers_image

PICTURE = GenerationParams("", seed=3, steps=4, cache_interval=2)
WORDS = {"dusk": ("red",), "night": ("blue", "ring")}
"""embeddings, and the words of the model whose vectors they take"""
ALIKE = {
    "dusk": "red",
    "a (dusk:1.4) circle on a night background": "a (red:1.4) circle on a blue ring background",
    f"{'a ' * 75}night circle, <DUSK>": f"{'a ' * 75}blue ring circle, red",
    "embedding:dusk and embedding:night": "red and blue ring",
}
"""prompts with embeddings, and with the words"""
PARTS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}


def vectors(checkpoint: Checkpoint, words: tuple[str, ...]) -> dict[str, Tensor]:
    """Take the words' vectors from the text encoders."""
    tensors = {}
    for (key, part), tokenizer in zip(PARTS.items(), checkpoint.tokenizers, strict=True):
        table: Any = checkpoint.part(part).get_input_embeddings()  # type: ignore[operator]
        tensors[key] = table.weight[tokenizer.encode(" ".join(words))].clone()
        assert len(tensors[key]) == len(words)
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("loras")
    (top / "embeddings").mkdir()
    for name, words in WORDS.items():
        save_file(vectors(find("mini"), words), top / "embeddings" / f"{name}.safetensors")
    return top


def pipeline(backend: str, folder: Path, *, is_deterministic: bool = False) -> Pipeline:
    made = load("mini", backend, device="cpu", is_deterministic=is_deterministic)
    made.catalogue = Catalogue([folder, LORAS])
    return made


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_an_embedding_is_as_the_words_whose_vectors_it_has(backend: str, folder: Path) -> None:
    """In both prompts, weighted, in a later chunk, and beside requests with others and LoRAs."""
    made = pipeline(backend, folder)
    asked = [replace(PICTURE, prompt=prompt) for prompt in ALIKE]
    asked += [replace(PICTURE, prompt="a red circle", negative_prompt="night")]
    asked += [replace(each, loras=(Lora("outlined"),)) for each in asked[:2]]
    expected = [
        replace(each, prompt=ALIKE.get(each.prompt, each.prompt), negative_prompt=negative)
        for each in asked
        for negative in [each.negative_prompt and "blue ring"]
    ]
    pairs = zip(asked, images_of(made, *asked), images_of(made, *expected), strict=True)
    for params, image, other in pairs:
        measured = psnr(image, other)
        assert measured >= LEAST_DB, f"{params.prompt}: {measured:.1f} dB, at least {LEAST_DB}"


@pytest.mark.slow
def test_a_deterministic_picture_has_the_bytes_that_it_has_alone(folder: Path) -> None:
    made = pipeline("onnxruntime", folder, is_deterministic=True)
    asked = [replace(PICTURE, prompt=prompt) for prompt in (*ALIKE, "a red circle")]
    together = images_of(made, *asked)
    for params, image in zip(asked, together, strict=True):
        assert torch.equal(image, images_of(made, params)[0]), params.prompt


@pytest.mark.slow
def test_pictures_are_those_of_diffusers(folder: Path, tmp_path: Path) -> None:
    """The embeddings have one or several random vectors, which `load_textual_inversion` reads."""
    plain = pipeline("torch", folder)
    pipe: Any = StableDiffusionXLPipeline.from_pretrained(
        str(plain.checkpoint.folder), torch_dtype=torch.float32, add_watermarker=False
    )
    pipe.set_progress_bar_config(disable=True)
    (tmp_path / "embeddings").mkdir()
    for seed, (name, words) in enumerate({"one": ("red",), "three": ("red", "ring", "a")}.items()):
        noise = torch.Generator().manual_seed(seed)
        found = {
            key: tensor + tensor.std() * torch.randn(tensor.shape, generator=noise)
            for key, tensor in vectors(plain.checkpoint, words).items()
        }
        save_file(found, tmp_path / "embeddings" / f"{name}.safetensors")
        for key, encoder, tokenizer in (
            ("clip_l", pipe.text_encoder, pipe.tokenizer),
            ("clip_g", pipe.text_encoder_2, pipe.tokenizer_2),
        ):
            pipe.load_textual_inversion(
                {name: found[key]}, token=f"<{name}>", text_encoder=encoder, tokenizer=tokenizer
            )
    made = Pipeline(plain.checkpoint, plain.engines, Catalogue([tmp_path]))
    prompt = "a <one> circle on a <three> background"
    params = replace(PICTURE, prompt=prompt, negative_prompt="<three>", cache_interval=1)
    (image,) = images_of(made, params)
    measured = psnr(image, diffusers_image(pipe, params))
    assert measured >= LEAST_DB, f"{measured:.1f} dB, at least {LEAST_DB}"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("embedding:nihgt", "such as night"), ("long", r"shape \(76, 64\)"), ("torn", "whole")],
)
def test_what_cannot_be_used_is_refused(folder: Path, prompt: str, reason: str) -> None:
    long = {key: tensor.repeat(76, 1) for key, tensor in vectors(find("mini"), ("red",)).items()}
    save_file(long, folder / "embeddings" / "long.safetensors")
    (folder / "embeddings" / "torn.safetensors").write_bytes(b"torn")
    made = pipeline("onnxruntime", folder)
    with pytest.raises(InvalidParams, match=rf"^prompt .*{reason}"):
        made.adapters(made.uses(replace(PICTURE, prompt=prompt)))


def test_the_bank_keeps_what_is_used_and_drops_the_rest(folder: Path) -> None:
    made = pipeline("torch", folder)
    shelf: Any = made.engines.adapters
    assert isinstance(shelf, BankShelf)
    uses = made.uses(replace(PICTURE, prompt="night"))
    kept = made.adapters(uses)
    tensors = {key: tensor.repeat(75, 1) for key, tensor in vectors(find("mini"), ("red",)).items()}
    for number in range(MOST_VECTORS // 75 + 1):
        name = f"wide{number}"
        save_file(tensors, folder / "embeddings" / f"{name}.safetensors")
        adapters = made.adapters(made.uses(replace(PICTURE, prompt=name)))
        assert not {*adapters.vectors} & {*kept.vectors}
    loads = shelf.loads
    assert made.adapters(uses).vectors == kept.vectors and shelf.loads == loads
