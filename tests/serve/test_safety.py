"""A safety checker: its verdicts equal diffusers', and a flagged picture is blurred or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from PIL import Image
from transformers import CLIPConfig

from sdxl.images import Pixels
from sdxl.params import InvalidParams
from sdxl.pipeline import Pipeline
from serve.settings import ServeSettings
from serve.worker.safety import FOLDER, ClipChecker, Safety, read_safety
from tests.sdxl.test_editing import drawing
from tests.serve.servers import post
from tests.serve.test_edits import picture_in, pixels
from tests.serve.workers import running

CPU = torch.device("cpu")
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TOWER |= {"num_attention_heads": 2, "projection_dim": 8}
PICTURES = [np.asarray(drawing(96, 64)), *(np.full((64, 64, 3), v, np.uint8) for v in (0, 90, 255))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random checker; the first picture resembles a concept, the second one of special care."""
    torch.manual_seed(0)
    vision = TOWER | {"image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=TOWER, vision_config=vision, projection_dim=8)
    checker: Any = StableDiffusionSafetyChecker(config)
    checker.concept_embeds.data.normal_()
    checker.special_care_embeds.data.normal_()
    checker.save_pretrained(tmp_path / "plain")
    plain = ClipChecker(tmp_path / "plain", CPU)
    embeddings = [embedding(plain, picture) for picture in PICTURES]
    checker.concept_embeds.data[0] = embeddings[0]
    checker.special_care_embeds.data[0] = embeddings[1]
    checker.concept_embeds_weights.data.fill_(0.999)
    checker.special_care_embeds_weights.data.fill_(0.999)
    checker.save_pretrained(tmp_path / FOLDER)
    return tmp_path


def embedding(checker: ClipChecker, picture: Pixels) -> torch.Tensor:
    image = checker.processor(Image.fromarray(picture), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        projected: torch.Tensor = checker.module.visual_projection(
            checker.module.vision_model(image)[1]
        )
    return projected.clone()


def test_verdicts_equal_those_of_diffusers(folder: Path) -> None:
    checker = ClipChecker(folder / FOLDER, CPU)
    images: Sequence[Any] = [Image.fromarray(picture) for picture in PICTURES]
    inputs = checker.processor(images, return_tensors="pt")["pixel_values"]
    copies = [np.array(picture) for picture in PICTURES]
    with torch.inference_mode():
        _, expected = checker.module(inputs, copies)
    assert expected[0] and not all(expected)
    assert [checker(picture, False) for picture in PICTURES] == expected


def test_the_models_own_checker_is_found_and_what_is_missing_is_named(folder: Path) -> None:
    settings = ServeSettings(safety="blur")
    assert isinstance(read_safety(settings, folder, CPU).checker, ClipChecker)
    assert read_safety(ServeSettings(), folder, CPU).checker is None
    with pytest.raises(InvalidParams, match="the model has no folder safety_checker"):
        read_safety(settings, folder / "none", CPU)
    with pytest.raises(InvalidParams, match="safety must be one of off, blur, refuse"):
        ServeSettings(safety="bulr")
    for name, message in (
        (str(folder), "must hold diffusers' StableDiffusionSafetyChecker"),
        ("no.such:function", "must be package.module:function"),
        ("nowhere", "must be a folder or package.module:function"),
    ):
        with pytest.raises(InvalidParams, match=message):
            read_safety(ServeSettings(safety="blur", safety_checker=name), folder, CPU)


def flag_unless_lenient(_: Pixels, is_lenient: bool) -> bool:
    return not is_lenient


def test_a_flagged_picture_is_blurred_and_said_to_be(mini: Pipeline) -> None:
    request = {"prompt": "a red circle on a white background", "seed": 1, "steps": 8}
    with running(mini, safety=Safety("blur", flag_unless_lenient)) as worker:
        flagged, plain = post(worker, request), post(worker, {**request, "moderation": "low"})
    assert flagged.json()["data"][0]["flagged"] and "flagged" not in plain.json()["data"][0]
    blurred, sharp = (
        np.abs(np.diff(pixels(picture_in(each)).astype(float), axis=0)).max()
        for each in (flagged, plain)
    )
    assert blurred < sharp / 4


def test_a_flagged_picture_is_refused() -> None:
    request = {"prompt": "a ring", "size": "128x128", "steps": 2}
    with running(safety=Safety("refuse", flag_unless_lenient)) as worker:
        answer = post(worker, request)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "moderation_blocked"
