"""The embedded model's refiner: its training, and the refiner in the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sdxl.checkpoint import find, find_refiner
from sdxl.conditioning import AESTHETIC_SCORES
from sdxl.params import GenerationParams
from sdxl.places import MINI_REFINER
from sdxl.refiner import refined_from
from tests.training.conftest import short_plan
from training.mini import refiner, topology
from training.mini.check import (
    WEIGHTS,
    held_out_scenes,
    load_painter,
    load_refiner,
    paint_with,
    psnr_of_straightened,
)
from training.mini.judge import shape_overlaps

WIDTH = topology.TEXT_WIDTH


def test_the_shipped_refiner_is_found_by_the_model_s_name() -> None:
    found = find_refiner("mini")
    assert found.is_refiner and found.arch.is_refiner
    assert found.scheduler == find("mini").scheduler
    found.part("unet")


def test_an_untrained_refiner_predicts_what_the_model_does() -> None:
    """Its text has all the information of the model's text."""
    torch.manual_seed(0)
    unet, translated = load_painter(WEIGHTS).unet, torch.randn(2 * WIDTH, WIDTH) / 8
    said, pooled = torch.randn(2, 9, WIDTH), torch.randn(2, WIDTH)
    context = said @ translated.T
    sample, step = torch.randn(2, 4, 16, 16), torch.tensor([151.0, 1.0])
    ids = torch.tensor([topology.TIME_IDS] * 2, dtype=torch.float32)
    scored = torch.cat([ids[:, :4], torch.tensor(AESTHETIC_SCORES)[:, None]], dim=1)
    with torch.no_grad():
        wanted, found = (
            network(
                sample, step, text, added_cond_kwargs={"text_embeds": pooled, "time_ids": own}
            ).sample
            for network, text, own in (
                (unet, context, ids),
                (refiner.new_refiner(unet, translated), said, scored),
            )
        )
    distance = float((found - wanted).abs().max())
    assert distance < 1e-3, f"differs by {distance:.2e}, allowed 1e-3"


@pytest.mark.slow
def test_the_refiner_is_trained_from_the_weights_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepts_all: None
) -> None:
    monkeypatch.setattr(refiner, "_ROWS", 2)
    plan, out = short_plan(refiner_courses=3, refiner_captions=3), tmp_path / "out"
    refiner.train_refiner(plan, WEIGHTS, out, tmp_path, "cpu")
    handovers = torch.load(tmp_path / "handovers-3.pt")
    assert [len(each) for each in handovers] == [4] * 7, "two batches of two"
    found = find_refiner(str(out))
    assert found.arch.is_refiner
    pipe = load_painter(WEIGHTS)
    begun = refiner.new_refiner(pipe.unet, refiner.RefinerText(pipe.text_encoder_2).translated)
    for part, before in (("unet", begun), ("text_encoder_2", pipe.text_encoder_2)):
        old, new = before.state_dict(), found.part(part).state_dict()
        same = [name for name in old if torch.equal(old[name].half(), new[name].half())]
        assert len(same) < len(old) / 5, f"{same} learnt nothing"


def test_the_length_of_a_context_s_error_is_that_of_its_keys_and_values() -> None:
    unet, context = load_painter(WEIGHTS).unet, torch.randn(40, 7, 2 * WIDTH)
    metric = refiner.error_metric(unet, context)
    error = torch.randn(5, 2 * WIDTH)
    shares = [
        (error @ layer.T).square().sum(-1) / (context @ layer.T).square().sum(-1).mean()
        for name, layer in unet.state_dict().items()
        if name.endswith(("attn2.to_k.weight", "attn2.to_v.weight"))
    ]
    found, expected = (error @ metric.T).square().sum(-1), torch.stack(shares).mean(0)
    assert torch.allclose(found, expected, rtol=1e-3)


def test_training_begins_at_the_step_where_requests_switch_to_the_refiner() -> None:
    asked = GenerationParams("a ring", steps=20, refiner="mini")
    assert refined_from(asked, find("mini").scheduler) == refiner.FIRST


@pytest.mark.long
def test_refined_pictures_of_unseen_scenes_are_as_good_as_the_models_own() -> None:
    scenes, pipe = held_out_scenes(12), load_painter()
    alone = paint_with(pipe, scenes)
    refined = paint_with(pipe, scenes, refiner=load_refiner(MINI_REFINER, pipe))
    before, after = (
        np.median([min(shape_overlaps(i, s)) for i, s in zip(images, scenes, strict=True)])
        for images in (alone, refined)
    )
    assert after >= before - 0.01, f"overlap {after:.3f}, {before:.3f} without the refiner"
    own_db, refined_db = (psnr_of_straightened(scenes, images) for images in (alone, refined))
    assert refined_db >= own_db - 1, f"{refined_db:.2f} dB, {own_db:.2f} without the refiner"
