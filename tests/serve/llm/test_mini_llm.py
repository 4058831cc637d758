"""The embedded language model is small, loads in plain transformers, and follows its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from sdxl.mini.scenes import Scene, Thing, caption, sample_scene
from serve.llm.names import MINI
from tests.serve.llm.texts import prompts
from training.llm import check, tokens, train
from training.llm.grammar import parse
from training.llm.short_prompts import Stated, WantedScene, full_scene, phrase, wanted_of


def test_it_is_small_and_stored_in_fp16() -> None:
    size = sum(path.stat().st_size for path in MINI.rglob("*") if path.is_file())
    assert size <= 6e6, f"{size / 1e6:.2f} MB, allowed 6"
    with safe_open(MINI / "model.safetensors", "pt") as file:
        names = list(file.keys())
        kinds = {file.get_slice(name).get_dtype() for name in names}
    assert kinds == {"F16"}


def test_plain_transformers_loads_and_runs_it(tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(MINI, output_loading_info=True)
    assert isinstance(model, LlamaForCausalLM)
    assert not (found["missing_keys"] or found["unexpected_keys"])
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters <= 3e6, f"{parameters} parameters, allowed 3 million"
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "circle"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    made = model.generate(**asked, max_new_tokens=40, do_sample=False)[0]
    text = tokenizer.decode(made[asked["input_ids"].shape[1] :], skip_special_tokens=True)
    scene = parse(text)
    assert scene is not None and scene.things[0].shape == "circle", text


@pytest.mark.parametrize("text", ["naïve 漢字 🎨\n\t", "\x00\x7f", "a red circle", "{}[]\\"])
def test_any_text_has_tokens_and_comes_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text.lower()


def test_every_word_of_the_grammar_is_one_token(tokenizer: Any) -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        text = caption(full_scene(rng))
        assert len(tokenizer(text).input_ids) == len(text.split()), text


@pytest.mark.timeout(600)
def test_the_tokenizer_is_made_again_to_the_byte(tmp_path: Path) -> None:
    tokens.write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (MINI / name).read_bytes(), name


def test_training_rows_depend_on_the_seed_alone(tokenizer: Any) -> None:
    rows = train.TrainingRows(tokenizer)
    first, second = (rows.batch(np.random.default_rng((12, 5))) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    ids, labels = first["input_ids"], first["labels"]
    is_learned = labels != train.UNLEARNED
    assert len(ids) == train.ROWS and torch.equal(ids[is_learned], labels[is_learned])


def test_captions_read_back_to_their_scenes() -> None:
    rng = np.random.default_rng(1)
    scenes = [sample_scene(rng) for _ in range(500)]
    for scene in scenes:
        assert parse(caption(scene)) == (scene if scene.is_full else None)


@pytest.mark.parametrize(
    "text",
    ["a red circles on a blue background", "two red cross on a blue background", "a cat", ""],
)
def test_other_texts_are_no_captions(text: str) -> None:
    assert parse(text) is None


def test_a_prompt_fits_its_scene_and_no_other() -> None:
    rng = np.random.default_rng(2)
    for _ in range(500):
        scene = full_scene(rng)
        wanted = wanted_of(scene, rng)
        assert wanted.is_kept_by(scene) and isinstance(phrase(wanted, rng), str)
    red = WantedScene((Stated("circle", "red"),), (1,))
    assert not red.is_kept_by(Scene((Thing("circle", "blue"),), "white"))
    assert not red.is_kept_by(Scene((Thing("circle", "red"),), "white", count=2))
    assert not red.is_kept_by(Scene((Thing("circle", "red"), Thing("star", "red")), "white"))


@pytest.mark.parametrize(("temperature", "needed"), [(0.0, 0.98), (0.3, 0.97)])
def test_expansions_keep_what_was_stated(mini_llm: Any, temperature: float, needed: float) -> None:
    asked = list(check.trials(400))
    wrong = check.faults(mini_llm, prompts(), asked, temperature)
    share = 1 - len(wrong) / len(asked)
    assert share >= needed, f"{share:.1%} are right, needed {needed:.0%}: {wrong}"


def test_only_the_requested_changes_are_made(mini_llm: Any) -> None:
    asked = list(check.changes(200))
    wrong = check.faults(mini_llm, prompts(), asked, 0.0)
    share = 1 - len(wrong) / len(asked)
    assert share >= 0.95, f"{share:.1%} are right, needed 95%: {wrong}"
