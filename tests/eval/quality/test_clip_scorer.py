"""The CLIP score, against transformers' model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextModelWithProjection,
    ResNetForImageClassification,
)

from eval.quality.clip_scorer import ClipScorer, clip_inputs, vit_b_32
from eval.quality.task import Judges
from sdxl.mini.clip import WEIGHTS, Scorer
from sdxl.mini.scenes import SIDE, draw, sample_scene
from sdxl.params import InvalidParams
from tests.eval.conftest import Noise

CAPTIONS = ["a red circle on a blue background", "a ring", "two green stars"]
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TINY_VISION = {**TINY, "num_attention_heads": 2, "image_size": 64, "patch_size": 32}
TINY_TEXT = {**TINY, "num_attention_heads": 2}


def test_scores_equal_transformers_on_the_embedded_model(judges: Judges) -> None:
    pictures = Noise().pictures(range(3))
    scorer = Scorer()
    pixels = torch.from_numpy(np.stack(pictures)).movedim(-1, 1) / 127.5 - 1
    tokens = scorer.tokenizer(CAPTIONS, padding="max_length", return_tensors="pt")
    vision = ResNetForImageClassification.from_pretrained(WEIGHTS / "vision", dtype=torch.float32)
    text = CLIPTextModelWithProjection.from_pretrained(WEIGHTS / "text", dtype=torch.float32)
    with torch.no_grad():
        seen, read = vision.eval()(pixels).logits, text.eval()(tokens.input_ids).text_embeds
    expected = 100 * torch.cosine_similarity(seen, read)
    scores = judges.clip.scores(pictures, CAPTIONS)
    assert scores == pytest.approx(expected.tolist(), rel=1e-4)


def test_scores_equal_transformers_with_clips_preprocessing() -> None:
    config = CLIPConfig(
        vision_config=TINY_VISION,
        text_config={**TINY_TEXT, "vocab_size": 646, "eos_token_id": 645},
        projection_dim=16,
    )
    torch.manual_seed(0)
    model, tokenizer = CLIPModel(config).eval(), Scorer().tokenizer
    pictures = Noise(side=100).pictures(range(3))
    scorer = ClipScorer(model, tokenizer, lambda each: clip_inputs(each, 64))
    tokens = tokenizer(CAPTIONS, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model(pixel_values=clip_inputs(pictures, 64), **tokens)
    expected = (100 * out.logits_per_image / model.logit_scale.exp()).diagonal()
    assert scorer.scores(pictures, CAPTIONS) == pytest.approx(expected.tolist(), rel=1e-4)


def test_clips_preprocessing_is_the_published_one() -> None:
    white = np.full((300, 300, 3), 255, np.uint8)
    inputs = clip_inputs([white], 224)
    assert inputs.shape == (1, 3, 224, 224)
    expected = [(1 - m) / d for m, d in ((0.48145466, 0.26862954), (0.4578275, 0.26130258))]
    assert inputs[0, :2, 100, 100].tolist() == pytest.approx(expected, rel=1e-5)


def test_the_distance_is_zero_to_itself_and_largest_to_another_scene(judges: Judges) -> None:
    rng = np.random.default_rng(0)
    scene, other = sample_scene(rng), sample_scene(rng)
    picture = draw(scene, 0)
    faint = np.clip(picture.astype(int) + rng.integers(-4, 5, picture.shape), 0, 255)
    others = [picture, faint.astype(np.uint8), draw(other, 0)]
    same, near, far = judges.clip.distances([picture] * 3, others)
    assert picture.shape == (SIDE, SIDE, 3)
    assert same == 0 and 0 < near < far < 2, (same, near, far)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidParams, match="clip must be a folder of openai/clip-vit-base-patch32; no config.json"
    ):
        vit_b_32(tmp_path)
    config = CLIPConfig(vision_config=TINY_VISION, text_config=TINY_TEXT)
    CLIPModel(config).save_pretrained(tmp_path)
    Scorer().tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InvalidParams, match="clip must be a folder of openai/clip.*hidden"):
        vit_b_32(tmp_path)
